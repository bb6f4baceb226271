"""Quantised graphs: scales, ranges, layers in fp32, narrowing, and what time does not depend on."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dsa_hw.channels import find_groups, shrink
from dsa_hw.errors import ModelError, ProfileError
from profilers.networks.builder import ConfigurationBuilder
from profilers.networks.onnx_export import export, generic
from profilers.networks.onnx_narrow.template import OnnxTemplate
from profilers.networks.quantisation import SCHEMES, Int8, calibrate, layers_of, noise_like, quantise
from profilers.networks.quantised import QuantisedNetwork, quantise_network
from profilers.profiling.sensitivity import int8_sensitivity
from profilers.targets import resolve
from tests.fakes.machine import Tiny
from tests.profilers.networks.test_onnx_narrow import Mixed, OptionA

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

U8 = Int8(SCHEMES["u8"])


@pytest.fixture(scope="module")
def exported() -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    torch.manual_seed(0)
    model, inputs = generic(Tiny()), (torch.randn(1, 3, 16, 16),)
    return model, inputs, export(model, inputs)


def arrays(proto: Any) -> dict[str, Any]:
    return {t.name: onnx.numpy_helper.to_array(t) for t in proto.graph.initializer}


def outputs(content: Any, inputs: tuple[torch.Tensor, ...], runtime: str = "onnxruntime") -> Any:
    content = content if isinstance(content, bytes) else bytes(content.SerializeToString())
    found = resolve(f"{runtime}/cpu").load(content, inputs).outputs
    assert found is not None
    return found()[0]


@pytest.mark.parametrize("name", ["int8", "int8-u8", "int8-s8-without:conv1,layer1.0.conv2", "int8-without:fc"])
def test_a_precision_is_read_as_it_is_written(name: str) -> None:
    assert str(Int8.parse(name)) == name


def test_other_precisions_are_no_int8() -> None:
    assert Int8.parse("fp32") is None
    assert Int8.parse("fp16") is None


@pytest.mark.parametrize("name", ["int8-u9", "int8x", "int8-without:", "int8-u8-without:a b"])
def test_a_wrong_precision_is_refused(name: str) -> None:
    with pytest.raises(ProfileError, match="int8"):
        Int8.parse(name)


def test_ranges_are_the_extremes_over_all_batches(exported: tuple[Any, ...]) -> None:
    model, _, proto = exported
    batches = [(torch.randn(1, 3, 16, 16),) for _ in range(3)]
    ranges = calibrate(proto, batches)
    with torch.no_grad():
        results = torch.cat([model(*batch) for batch in batches])
    given = torch.cat([batch[0] for batch in batches])
    assert ranges[proto.graph.input[0].name] == pytest.approx((float(given.min()), float(given.max())))
    assert ranges[proto.graph.output[0].name] == pytest.approx((float(results.min()), float(results.max())), rel=1e-4)


def test_calibration_needs_inputs_that_give_finite_values(exported: tuple[Any, ...]) -> None:
    with pytest.raises(ModelError, match="no calibration input"):
        calibrate(exported[2], [])
    with pytest.raises(ModelError, match="not finite"):
        calibrate(exported[2], [(torch.full((1, 3, 16, 16), torch.inf),)])


@pytest.mark.parametrize("scheme", ["u8", "s8", "u8layers"])
def test_weights_have_a_scale_for_each_channel_and_are_right_to_half_a_step(
    scheme: str, exported: tuple[Any, ...]
) -> None:
    _, inputs, proto = exported
    made = arrays(quantise(proto, calibrate(proto, [inputs]), Int8(SCHEMES[scheme])))
    for layer in layers_of(proto):
        weight = arrays(proto)[f"{layer}.weight"]
        quantised, scale = made[f"{layer}.weight_quantized"], made[f"{layer}.weight_scale"]
        assert quantised.dtype == np.int8
        assert scale.shape == (len(weight),)
        wide = scale.reshape(-1, *[1] * (weight.ndim - 1))
        assert (np.abs(quantised * wide - weight) <= 0.51 * wide).all()
    assert set(layers_of(proto)) == {"stem", "inner", "back", "head"}


def test_a_layer_can_stay_in_fp32(exported: tuple[Any, ...]) -> None:
    _, inputs, proto = exported
    ranges = calibrate(proto, [inputs])
    made = arrays(quantise(proto, ranges, Int8(SCHEMES["u8"], ("inner",))))
    assert made["inner.weight"].dtype == np.float32
    assert made["back.weight_quantized"].dtype == np.int8
    with pytest.raises(ProfileError, match=r"Unknown layer 'iner'. Did you mean 'inner'\?"):
        quantise(proto, ranges, Int8(SCHEMES["u8"], ("iner",)))


def test_global_pooling_gets_its_int8_kernel() -> None:
    """torch exports it as a mean, which has none: a whole activation would go back to fp32."""
    model, inputs = (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1)),
        torch.randn(1, 3, 8, 8),
    )
    proto = export(generic(model), (inputs,))
    assert "ReduceMean" in {n.op_type for n in proto.graph.node}, "no test if the exporter writes the pooling itself"
    made = quantise(proto, calibrate(proto, [(inputs,)]), U8)
    assert "ReduceMean" not in {n.op_type for n in made.graph.node}
    wanted, found = outputs(proto, (inputs,)), outputs(made, (inputs,))
    assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


def test_ranges_of_another_network_are_refused(exported: tuple[Any, ...]) -> None:
    with pytest.raises(ProfileError, match="do not belong to this graph"):
        quantise(exported[2], {"x": (0.0, 1.0)}, U8)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("scheme", ["u8", "s8", "s8sym"])
def test_the_quantised_network_is_close_to_the_network(runtime: str, scheme: str, exported: tuple[Any, ...]) -> None:
    _, inputs, proto = exported
    made = quantise(proto, calibrate(proto, [inputs]), Int8(SCHEMES[scheme]))
    onnx.checker.check_model(made, full_check=True)
    wanted, found = outputs(proto, inputs), outputs(made, inputs, runtime)
    error = np.linalg.norm(found - wanted) / np.linalg.norm(wanted)
    assert 1e-4 < error < 0.05, "an error of exactly 0 would mean that nothing was quantised"


@pytest.mark.parametrize(
    ("network", "scheme"),
    [(OptionA, "u8"), (Mixed, "u8layers"), *(pytest.param(Mixed, s, marks=pytest.mark.slow) for s in ("u8", "s8sym"))],
)
def test_narrowed_int8_graph_equals_shrunk_network_quantised_with_the_same_ranges(
    network: type[nn.Module], scheme: str
) -> None:
    """Only the scales of weights may differ: those of the dense network cover channels that were removed."""
    torch.manual_seed(0)
    model, inputs = generic(network()), (torch.randn(1, 3, 8, 8),)
    groups = find_groups(model, inputs)
    int8 = Int8(SCHEMES[scheme])
    template = OnnxTemplate(model, groups, inputs, int8)
    ranges = calibrate(export(model, inputs), [inputs])
    rng = np.random.default_rng(0)
    kept = [np.sort(rng.permutation(int(c))[: max(1, int(0.6 * c))]) for c in groups.sizes]
    narrowed = template.make(kept)
    onnx.checker.check_model(narrowed, full_check=True)
    small = shrink(model, groups, kept)
    apart = quantise(export(small, inputs), ranges, int8)
    operations = [Counter(n.op_type for n in p.graph.node) for p in (onnx.load_from_string(narrowed), apart)]
    assert operations[0] == operations[1]
    wanted, found = outputs(apart, inputs), outputs(narrowed, inputs)
    with torch.no_grad():
        plain = small(*inputs).numpy()
    between = np.linalg.norm(found - wanted) / np.linalg.norm(plain)
    assert between < max(0.05, 2 * np.linalg.norm(wanted - plain) / np.linalg.norm(plain))


def test_the_builder_narrows_int8_graphs(exported: tuple[Any, ...]) -> None:
    model, inputs, _ = exported
    builder = ConfigurationBuilder(
        model, find_groups(model, inputs), inputs, resolve("onnxruntime/cpu", precision="int8-u8")
    )
    worst = builder.check()
    assert worst is not None
    assert worst < 1e-4, "the error of narrowing, not that of int8"
    assert builder.how == "narrowed"


def test_kernels_do_not_depend_on_the_values_of_weights_and_activations(tmp_path: Any) -> None:
    """Other weights, other calibration inputs: ONNX Runtime fuses the same operations with the same shapes."""
    import onnxruntime as ort

    def optimised(seed: int, scale: float) -> list[tuple[Any, ...]]:
        torch.manual_seed(seed)
        model, inputs = generic(Tiny(), seed), (torch.randn(1, 3, 16, 16),)
        proto = export(model, inputs)
        ranges = calibrate(proto, [(scale * torch.randn(1, 3, 16, 16),) for _ in range(4)])
        options = ort.SessionOptions()
        options.optimized_model_filepath = str(tmp_path / f"{seed}.onnx")
        options.log_severity_level = 4
        ort.InferenceSession(quantise(proto, ranges, U8).SerializeToString(), options)
        graph = onnx.load(options.optimized_model_filepath).graph
        shapes = {t.name: tuple(t.dims) for t in graph.initializer}
        return [(n.op_type, n.domain, *(shapes.get(x) for x in n.input)) for n in graph.node]

    first = optimised(0, 1.0)
    assert Counter(row[0] for row in first)["QLinearConv"] == 3, "no test if nothing runs in int8"
    assert first == optimised(1, 10.0)


def test_noise_replaces_constant_inputs_only() -> None:
    constant, varied, whole = torch.zeros(1, 3), torch.arange(3.0)[None], torch.zeros(1, 3, dtype=torch.int64)
    found = noise_like((constant, varied, whole))
    assert float(found[0].std()) > 0
    assert found[1] is varied
    assert found[2] is whole


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_a_quantised_network_runs_batches_of_any_size(runtime: str, exported: tuple[Any, ...]) -> None:
    model, _, _ = exported
    example = (torch.randn(4, 3, 16, 16),)
    images = torch.randn(6, 3, 16, 16)
    target = resolve(f"{runtime}/cpu", precision="int8-u8")
    network = quantise_network(model, example, target, batches=[(images,)])
    assert isinstance(network, QuantisedNetwork)
    whole = network(images)
    assert whole.shape == (6, 5)
    np.testing.assert_allclose(whole[4:], network(images[4:]), atol=1e-6)
    again = quantise_network(model, example, target, ranges=network.ranges)
    assert again.content == network.content, "weights and ranges determine the file"


def test_only_targets_in_int8_quantise(exported: tuple[Any, ...]) -> None:
    with pytest.raises(ProfileError, match="must be in int8"):
        quantise_network(exported[0], exported[1], resolve("onnxruntime/cpu"))


def test_the_layer_with_an_outlier_is_the_most_sensitive(exported: tuple[Any, ...]) -> None:
    model, inputs, _ = exported
    bad = generic(model)
    with torch.no_grad():
        bad.get_submodule("inner").weight[:, 0, 0, 0] = 30.0  # type: ignore[index]  # steps become coarse
    before = int8_sensitivity(model, inputs, [(torch.randn(8, 3, 16, 16),)]).set_index("layer")["error"]
    after = int8_sensitivity(bad, inputs, [(torch.randn(8, 3, 16, 16),)])
    assert set(before.index) == {"stem", "inner", "back", "head"}
    assert after["error"].is_monotonic_decreasing
    assert after.set_index("layer")["error"]["inner"] > 2 * before["inner"]
