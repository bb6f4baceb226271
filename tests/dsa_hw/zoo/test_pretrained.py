"""Pretrained weights come from the caches of torch and Hugging Face; without them a message says what to put where."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dsa_hw.errors import ModelError
from dsa_hw.zoo import pretrained
from dsa_hw.zoo.models import load_model, preprocessing_of

TIMM = "timm/mobilenetv3_small_050.lamb_in1k"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches in a folder of the test, and no network."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    cached = hub.hf_hub_download

    def download(local_files_only: bool = False, **where: object) -> str:
        if not local_files_only:
            raise OSError("no network in tests")
        return str(cached(**where, local_files_only=True, cache_dir=tmp_path / "hf"))

    def torch_download(*_: object) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(hub, "hf_hub_download", download)
    monkeypatch.setattr(torch.hub, "download_url_to_file", torch_download)
    return tmp_path


def plant(caches: Path, repository: str, **files: bytes) -> None:
    """Write files as Hugging Face keeps them: a revision, and a snapshot of it."""
    folder = caches / "hf" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    for name, content in files.items():
        (folder / "snapshots" / ("0" * 40) / name.replace("_json", ".json").replace("_st", ".safetensors")).write_bytes(
            content
        )


def weights_of(name: str, **options: object) -> dict[str, torch.Tensor]:
    torch.manual_seed(5)
    state = load_model(name, **options)[0].state_dict()
    return {key: value.clone() for key, value in state.items()}


def test_weights_of_torchvision_come_from_its_cache(caches: Path) -> None:
    state = weights_of("mobilenet_v3_small")
    file = caches / "torch" / "hub" / "checkpoints" / "mobilenet_v3_small-047dcff4.pth"
    with pytest.raises(
        ModelError, match=r"Without network access put https://\S+/mobilenet_v3_small-047dcff4.pth at "
    ) as e:
        load_model("mobilenet_v3_small", pretrained=True)
    assert str(file) in str(e.value)
    assert "\n" not in str(e.value)
    torch.save(state, file)
    model, _ = load_model("mobilenet_v3_small", pretrained=True)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_new_classes_keep_a_random_last_layer(caches: Path) -> None:
    state = weights_of("mobilenet_v3_small")
    file = caches / "torch" / "hub" / "checkpoints" / "mobilenet_v3_small-047dcff4.pth"
    file.parent.mkdir(parents=True)
    torch.save(state, file)
    model, inputs = load_model("mobilenet_v3_small", (1, 3, 32, 32), pretrained=True, classes=7)
    assert model(*inputs).shape == (1, 7)
    found = model.state_dict()
    assert [key for key in state if not torch.equal(found[key], state[key])] == [
        "classifier.3.weight",
        "classifier.3.bias",
    ]


def test_weights_of_timm_come_from_the_cache_of_hugging_face(caches: Path) -> None:
    pytest.importorskip("timm")
    with pytest.raises(ModelError, match=r"copy the folder \S+models--timm--mobilenetv3_small_050.lamb_in1k") as e:
        load_model(TIMM, pretrained=True)
    assert "give it with --weights" in str(e.value)
    state = weights_of(TIMM)
    plant(caches, "timm/mobilenetv3_small_050.lamb_in1k", model_st=safetensors.torch.save(state))
    model, _ = load_model(TIMM, pretrained=True)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_repository_of_the_hub_has_its_own_configuration(caches: Path) -> None:
    pytest.importorskip("timm")
    state = weights_of(TIMM, classes=3)
    config = {
        "architecture": "mobilenetv3_small_050", "num_classes": 3,
        "pretrained_cfg": {"input_size": [3, 96, 96], "mean": [0.5] * 3, "std": [0.25] * 3, "crop_pct": 0.96},
    }  # fmt: skip
    plant(caches, "me/mine", config_json=json.dumps(config).encode(), model_st=safetensors.torch.save(state))
    model, inputs = load_model("hf-hub:me/mine", pretrained=True)
    assert inputs[0].shape == (1, 3, 96, 96)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    found = preprocessing_of("hf-hub:me/mine")
    assert (found.size, found.resize, found.mean) == ((96, 96), (100, 100), (0.5, 0.5, 0.5))


def test_configuration_cannot_choose_other_code(caches: Path) -> None:
    pytest.importorskip("timm")
    with pytest.raises(ModelError, match=r"^Cannot get config.json of me/none .*or give timm/NAME") as error:
        load_model("hf-hub:me/none", pretrained=True)
    assert str(error.value).count("(") == 1
    plant(caches, "me/bert", config_json=b'{"architectures": ["BertModel"]}')
    with pytest.raises(ModelError, match=r"me/bert is no model of timm \(its config.json names no architecture\)"):
        load_model("hf-hub:me/bert")
    plant(caches, "me/other", config_json=b'{"architecture": "os.system"}')
    with pytest.raises(ModelError, match="is no model of timm"):
        load_model("hf-hub:me/other")
    given = {"architecture": "resnet18", "model_args": {"checkpoint_path": "secret.pt"}}
    plant(caches, "me/third", config_json=json.dumps(given).encode())
    with pytest.raises(ModelError, match="must not choose checkpoint_path"):
        load_model("hf-hub:me/third")


def test_preprocessing_is_that_of_the_weights() -> None:
    found = preprocessing_of("efficientnet_b3")
    assert (found.size, found.resize, found.interpolation) == ((300, 300), (320, 320), "bicubic")
    assert preprocessing_of("resnet18", (1, 3, 112, 112)).resize == (128, 128)
    pytest.importorskip("timm")
    assert preprocessing_of("timm/resnet50.a1_in1k").size == (224, 224)


def test_unknown_tag_is_answered_with_known_ones() -> None:
    pytest.importorskip("timm")
    with pytest.raises(ModelError, match=r"Did you mean timm/resnet50\.a1"):
        load_model("timm/resnet50.a1_in1kk")


def test_networks_without_weights_say_so() -> None:
    with pytest.raises(ModelError, match="no pretrained weights of resnet20"):
        load_model("resnet20", pretrained=True)
    pytest.importorskip("timm")
    with pytest.raises(ModelError, match=r"no pretrained weights of seresnet34. Give a file with --weights"):
        load_model("timm/seresnet34", pretrained=True)


def test_downloads_have_a_time_limit() -> None:
    import socket

    with pretrained._time_limit():
        assert socket.getdefaulttimeout() == pretrained._TIMEOUT
    assert socket.getdefaulttimeout() is None
