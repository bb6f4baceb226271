"""A saved folder stands alone; what is loaded is checked, and nothing that a file says is executed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import dsa_hw
from dsa_hw.channels.plan import Plan
from dsa_hw.errors import DsaError, ModelError, PlanError
from dsa_hw.pipeline.result import Allocation
from dsa_hw.utils.documents import sealed
from dsa_hw.zoo.constructors import Constructor
from dsa_hw.zoo.models import load_model
from tests.fakes.formula import Net
from tests.fakes.hub import Hub, hub_server


def pruned(model: nn.Module, *inputs: Any) -> Allocation:
    return dsa_hw.allocate(
        model, "flops=60%", example_inputs=inputs, method="uniform", recovery="none", progress=False
    )  # fmt: skip


@pytest.fixture(scope="module")
def example() -> torch.Tensor:
    return torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def result() -> Allocation:
    torch.manual_seed(0)
    model, (image,) = load_model("resnet20", classes=7)
    return pruned(model, image)


def test_folder_of_a_known_network_stands_alone(result: Allocation, example: torch.Tensor, tmp_path: Path) -> None:
    assert result.plan.constructor == Constructor(library="dsa_hw", name="resnet20", arguments={"classes": 7})
    result.save(tmp_path / "small")
    state = torch.get_rng_state()
    for place in (tmp_path / "small", str(tmp_path / "small" / "plan.json")):
        small = dsa_hw.load(place)
        assert not small.training
        assert torch.equal(small(example), result.model(example))
    assert torch.equal(state, torch.get_rng_state()), "random numbers stay as they were"


def test_own_class_must_be_given(net: Net, tmp_path: Path) -> None:
    image = torch.randn(1, 3, 16, 16)
    found = pruned(net, image)
    assert found.plan.constructor is None
    found.save(tmp_path)
    with pytest.raises(PlanError, match=r"load\(folder, model=MyNet\(\)\)"):
        dsa_hw.load(tmp_path)
    other = Net().eval()
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    assert torch.equal(dsa_hw.load(tmp_path, model=other)(image), found.model(image))
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    with pytest.raises(PlanError, match="another network"):
        dsa_hw.load(tmp_path, model=nn.Sequential(nn.Conv2d(3, 8, 3)))


def test_card_has_front_matter_and_the_table_of_the_certificate(result: Allocation, tmp_path: Path) -> None:
    result.save(tmp_path)
    text = (tmp_path / "README.md").read_text()
    front, body = text.removeprefix("---\n").split("---\n", 1)
    meta = yaml.safe_load(front)
    assert meta["library_name"] == "dsa_hw"
    assert {"pruning", "pytorch"} <= set(meta["tags"])
    (entry,) = result.certificate.entries
    row = next(line for line in body.splitlines() if line.startswith("| FLOPs"))
    assert [cell.strip().replace("\\", "") for cell in row.strip("|").split("|")][-1] == str(entry.verdict)
    assert 'dsa_hw.load(".")' in body
    for name in Plan.load(tmp_path / "plan.json").files:
        assert f"`{name}`" in body
    assert "README.md" not in Plan.load(tmp_path / "plan.json").files


def test_readme_of_the_user_is_never_overwritten(result: Allocation, tmp_path: Path) -> None:
    result.save(tmp_path)
    first = (tmp_path / "README.md").read_text()
    (tmp_path / "README.md").write_text("old")
    for text in ("# My project\n", first + "License: MIT\n"):
        (tmp_path / "README.md").write_text(text)
        result.save(tmp_path)
        assert (tmp_path / "README.md").read_text() == text
    (tmp_path / "README.md").write_text(first)
    result.save(tmp_path, onnx=False)
    assert (tmp_path / "README.md").read_text() == first, "an own card is written again"
    dsa_hw.load(tmp_path)


def forged(folder: Path, **changes: Any) -> Path:
    """Change fields of the plan and seal it again, as a stranger can."""
    content = json.loads((folder / "plan.json").read_text())
    content.pop("sha256")
    for key, value in changes.items():
        content[key] = value
    (folder / "plan.json").write_text(json.dumps(sealed(content)))
    return folder


HOSTILE = [
    {"library": "os", "name": "system", "arguments": {}},
    {"library": "torchvision", "name": "os.system", "arguments": {}},
    {"library": "torchvision", "name": "resnet18", "arguments": {"weights": "DEFAULT"}},
    {"library": "torchvision", "name": "resnet18", "arguments": {"num_classes": 10**12}},
    {"library": "torchvision", "name": "resnet18", "arguments": {"num_classes": "__import__('os')"}},
    {"library": "timm", "name": "hf-hub/someone", "arguments": {}},
    {"library": "timm", "name": "local-dir", "arguments": {}},
    {"library": "timm", "name": "resnet18", "arguments": {"checkpoint_path": "x.pt"}},
    {"library": "timm", "name": "resnet18", "arguments": {"pretrained": True}},
    {"library": "transformers", "name": "bert/pipeline", "arguments": {}},
    {"library": "transformers", "name": "auto/AutoModel", "arguments": {}},
    {"library": "transformers", "name": "detr/DetrForObjectDetection", "arguments": {}},
    {"library": "transformers", "name": "bert/BertModel", "arguments": {"auto_map": {"AutoModel": "x--y.z"}}},
    {"library": "transformers", "name": "bert/BertModel", "arguments": {"attn_implementation": "someone/kernel"}},
    {"library": "dsa_hw", "name": "resnet56", "arguments": {"classes": 7}},
]


@pytest.mark.parametrize("record", HOSTILE, ids=lambda record: f"{record['name']} {list(record['arguments'])}")
def test_record_of_a_stranger_makes_no_other_network(
    record: dict[str, Any], result: Allocation, tmp_path: Path
) -> None:
    if record["library"] in ("timm", "transformers"):
        pytest.importorskip(record["library"], reason=f"pip install 'dsa-hw[{record['library']}]'")
    with pytest.raises(DsaError) as caught:
        dsa_hw.load(forged(result.save(tmp_path), constructor=record))
    assert "\n" not in str(caught.value)


def test_damaged_and_missing_files_are_refused(result: Allocation, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"has no plan\.json"):
        dsa_hw.load(tmp_path)
    weights = result.save(tmp_path) / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(PlanError, match="SHA-256 differs"):
        dsa_hw.load(tmp_path)
    with pytest.raises(PlanError, match="SHA-256 differs"):  # the hash of the file forged too: that of the tensors
        dsa_hw.load(forged(tmp_path, files={}))
    weights.unlink()
    with pytest.raises(PlanError, match=r"has no model\.safetensors"):
        dsa_hw.load(tmp_path)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    huggingface_hub = pytest.importorskip("huggingface_hub", reason="pip install 'dsa-hw[hub]'")
    with hub_server() as server:
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", "hf_made_up")
        yield server


def test_result_goes_to_the_hub_and_comes_back(
    result: Allocation, example: torch.Tensor, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = result.push_to_hub("me/small", private=True)
    assert url == f"{hub.url}/me/small/commit/{hub.commit('me/small')}"
    assert {"plan.json", "model.safetensors", "README.md"} <= set(hub.files["me/small"])
    for name in ("me/small", f"me/small@{hub.commit('me/small')}"):
        assert torch.equal(dsa_hw.from_hub(name)(example), result.model(example))
    fetched = {path.rpartition("/")[2] for path in hub.asked if path.startswith("GET") and "/resolve/" in path}
    assert fetched == {"plan.json", "model.safetensors"}, "nothing else is downloaded"
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        "dsa_hw.zoo.pretrained._check_network", lambda url: (_ for _ in ()).throw(OSError("no network"))
    )
    assert torch.equal(dsa_hw.from_hub("me/small")(example), result.model(example)), "from the cache"
    with pytest.raises(ModelError, match=r"no network.*not in the cache"):
        dsa_hw.from_hub("me/other")


def test_repositories_of_strangers_are_refused(hub: Hub) -> None:
    with pytest.raises(ModelError, match="ORG/NAME"):
        dsa_hw.from_hub("../../etc")
    with pytest.raises(ModelError, match="Cannot get me/none"):
        dsa_hw.from_hub("me/none")
    hub.files["me/x"] = {"README.md": b"hello", "plan.json": b"{}"}
    with pytest.raises(ModelError, match=r"no result of dsa_hw: it has no model\.safetensors"):
        dsa_hw.from_hub("me/x")
    hub.files["me/x"]["model.safetensors"] = b"x"
    hub.sizes["plan.json"] = 2**40
    with pytest.raises(ModelError, match="has 1099511627776 bytes"):
        dsa_hw.from_hub("me/x")
    assert not any("/resolve/" in path for path in hub.asked)
    hub.sizes.clear()
    with pytest.raises(PlanError, match="format"):
        dsa_hw.from_hub("me/x")


def test_types_of_inputs_are_kept(tmp_path: Path) -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.hidden, self.last = nn.Embedding(9, 8), nn.Linear(8, 16), nn.Linear(16, 3)

        def forward(self, tokens: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.hidden(self.embedding(tokens)))) * scale

    found = pruned(Tokens().eval(), torch.zeros(2, 5, dtype=torch.int64), torch.ones(1))
    assert found.plan.types == ("int64", "float")
    found.save(tmp_path)
    small = dsa_hw.load(tmp_path, model=Tokens())
    tokens, scale = torch.randint(9, (2, 5)), torch.randn(1)
    assert torch.equal(small(tokens, scale), found.model(tokens, scale))
    plan = Plan.load(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="a type for each input"):
        replace(plan, types=("int64",)).save(tmp_path / "plan.json")
