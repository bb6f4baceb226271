"""Reading of Vela's CSV files."""

from __future__ import annotations

import pytest

from profilers.litert.worker.vela import VelaError, _run, parse

# Written by Vela 5.2.0 for a MobileNetV2; columns that nobody reads are left out, two operations are made up.
SUMMARY = """experiment,network,accelerator_configuration,core_clock,inference_time,sram_memory_used,dram_memory_used,\
on_chip_flash_memory_used,off_chip_flash_memory_used,nn_macs,cycles_npu,cycles_total
default,q,Ethos_U55_128,500000000.0,0.000227910,274.40625,0.0,0.0,3399.15625,2654208,57503,113955
"""


LAYERS = """Original Operator,NNG Operator,Target,Op Cycles,NPU,SRAM AC,DRAM AC,OnFlash AC,OffFlash AC,MAC Count,Name
Conv2D,Conv2D,NPU,57503,57503,33512,0,0,16576,1990656,a;b;12
Conv2D,Relu6,NPU,0,0,0,0,0,0,0,a;b;12
DepthwiseConv2D,DepthwiseConv2D,NPU,56452,56452,24560,0,0,8960,663552,a;b;23
"""


def test_operations_of_vela_add_up_to_its_total() -> None:
    found = parse(SUMMARY, LAYERS)
    assert found["seconds"] == pytest.approx(found["cycles"] / found["clock"])
    assert found["memory"]["off_chip_flash"] == 3399.15625 * 1024
    assert [o["name"] for o in found["operations"]] == ["0:Conv2D", "2:DepthwiseConv2D"]
    assert sum(o["cycles"] for o in found["operations"]) == found["cycles"]
    assert found["operations"][1]["busy"] == {"npu": 56452, "sram": 24560, "off_chip_flash": 8960}
    assert found["on_cpu"] == []


def test_operators_that_run_on_the_cpu_are_listed() -> None:
    assert parse(SUMMARY, LAYERS + "ArgMax,ArgMax,CPU,0,0,0,0,0,0,0,x\n")["on_cpu"] == ["ArgMax"]


@pytest.mark.parametrize(
    ("summary", "layers"),
    [
        ("", LAYERS),
        (SUMMARY.replace("cycles_total", "c"), LAYERS),
        (SUMMARY, "Target\nNPU\n"),
        (SUMMARY.replace("0.000227910", "nan"), LAYERS),
        (SUMMARY.replace("0.000227910", "1e999"), LAYERS),
        (SUMMARY.replace("0.000227910", "-1"), LAYERS),
        (SUMMARY.replace("0.000227910", "1.2.3"), LAYERS),
        (SUMMARY, LAYERS.replace("57503", "-57503")),
        (SUMMARY, LAYERS + "x" * 200_000),
    ],
)
def test_unexpected_format_of_vela_is_an_error(summary: str, layers: str) -> None:
    with pytest.raises(VelaError, match="expected format"):
        parse(summary, layers)


def test_vela_that_hangs_or_floods_is_ended() -> None:
    with pytest.raises(VelaError, match=r"did not end within 0.2 s"):
        _run(["sleep", "60"], limit=0.2)
    with pytest.raises(VelaError, match=r"did not end within 0.5 s"):
        _run(["sh", "-c", "exec >&- 2>&-; exec sleep 60"], limit=0.5)  # closes its output first
    with pytest.raises(VelaError, match="printed more than 1000 bytes"):
        _run(["yes"], limit=60, most=1000)
    assert _run(["sh", "-c", "echo a; echo b >&2; exit 3"], limit=60) == (3, "a\nb\n")
