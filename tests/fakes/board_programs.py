"""Programs that behave like NVIDIA's ``trtexec`` and LiteRT's ``benchmark_model``, for tests without such a board.

Options, the banner, the file of ``--exportTimes``, the messages and exit codes follow the source of trtexec
(NVIDIA/TensorRT, samples/trtexec and samples/common, 8.5 to 10) and of benchmark_model (TensorFlow Lite's
tools/benchmark). A run takes longer for a longer file, so that narrower networks are faster. Every call is a line in
the file ``calls`` beside the program.
"""

from __future__ import annotations

import sys
from pathlib import Path

__all__ = ["benchmark_model", "calls", "trtexec"]

_TRTEXEC = """
import json, os, random, sys, time
here, banner, precisions, mode = os.path.dirname(os.path.abspath(__file__)), "v@NUMBER@", @FLAGS@, "@MODE@"
words = sys.argv[1:]
with open(os.path.join(here, "calls"), "a") as log:
    log.write(" ".join(words) + "\\n")
name = "TensorRT.trtexec [TensorRT %s]" % banner
print("&&&& RUNNING %s # %s" % (name, " ".join(sys.argv)))
known = ["--onnx", "--saveEngine", "--loadEngine", "--timingCacheFile", "--exportTimes", "--iterations", "--duration",
         "--warmUp", "--noDataTransfers", "--useSpinWait", *precisions]
if "--help" in words:
    print("=== Build Options ===")
    for option in known:
        print("  %s    what it does (default = disabled)" % option)
    sys.exit(0)
given = dict(word.partition("=")[::2] for word in words)

def fail(text):
    print("[01/02/2026-03:04:05] [E] " + text)
    print("&&&& FAILED %s # %s" % (name, " ".join(sys.argv)))
    sys.exit(1)

for option in given:
    if option not in known:
        fail("Unknown option: %s %s" % (option, given[option]))
if mode == "hang":
    time.sleep(60)
if "--onnx" in given:
    data = open(given["--onnx"], "rb").read()
    if not data:
        fail("Failed to parse onnx file")
    with open(given["--timingCacheFile"], "a") as cache:
        cache.write("layer\\n")
    engine = {"ms": 0.1 + len(data) / 1e5, "precision": [p for p in precisions if p in given]}
    with open(given["--saveEngine"], "w") as file:
        json.dump(engine, file)
else:
    engine = json.load(open(given["--loadEngine"]))
now, runs, warm = 0.0, [], float(given.get("--warmUp", 200))
while now < warm or sum(r["startComputeMs"] >= warm for r in runs) < int(given.get("--iterations", 10)):
    took = engine["ms"] * random.uniform(1.0, 1.02)
    runs.append({"startEnqMs": now, "endEnqMs": now, "startH2dMs": now, "endH2dMs": now, "startComputeMs": now,
                 "endComputeMs": now + took, "startD2hMs": now, "endD2hMs": now, "h2dMs": 0, "computeMs": took,
                 "d2hMs": 0, "latencyMs": took})
    now += max(took, warm / 50)
if "--exportTimes" in given and mode != "silent":
    kept = [r for r in runs if r["startComputeMs"] >= warm][: -1 if mode == "short" else None]
    with open(given["--exportTimes"], "w") as file:  # the format of ostream: spaces around the colon
        rows = ["{ " + ", ".join('"%s" : %g' % item for item in r.items()) + " }" for r in kept]
        file.write("[\\n  " + "\\n, ".join(rows) + "\\n]\\n" if mode != "words" else "[ { nothing } ]")
print("[01/02/2026-03:04:05] [I] GPU Compute Time: min = 1 ms, max = 2 ms, mean = 1 ms, median = 1 ms")
print("&&&& PASSED " + name)
"""

_BENCHMARK = """
import os, sys
here = os.path.dirname(os.path.abspath(__file__))
with open(os.path.join(here, "calls"), "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
given = dict(word.partition("=")[::2] for word in sys.argv[1:])
known = {"--graph", "--num_threads", "--use_xnnpack", "--warmup_runs", "--warmup_min_secs", "--min_secs", "--num_runs"}
if set(given) - known or not os.path.exists(given["--graph"]):
    print("ERROR: Failed to load model", file=sys.stderr)
    sys.exit(1)
mean = 100.0 + os.path.getsize(given["--graph"]) / 10
print("INFO: STARTING!")
print("INFO: count=%s first=90 curr=99 min=90 max=120 avg=%g std=3" % (given["--num_runs"], mean))
print("INFO: Inference timings in us: Init: 5811, First inference: 67743, Warmup (avg): 65539, "
      "Inference (avg): %g" % mean, file=sys.stderr)
"""


def trtexec(folder: Path, version: str = "8502", mode: str = "") -> Path:
    """Write a trtexec of a version: 8502 is 8.5.2, 100300 is 10.3.0.

    Args:
        folder: Where to write it.
        version: The number in its banner, which decides the flags that it has.
        mode: "hang", or what is wrong with its file of times: "silent" (none), "short" (a run is missing) or "words".
    """
    number = int(version)
    flags = ["--fp16", "--int8"] if number < 100000 else ["--stronglyTyped", "--fp16", "--int8"]
    flags = [] if number >= 110000 else flags
    text = _TRTEXEC.replace("@NUMBER@", version).replace("@FLAGS@", repr(flags)).replace("@MODE@", mode)
    return _program(folder / "trtexec", text)


def benchmark_model(folder: Path) -> Path:
    """Write a benchmark_model."""
    return _program(folder / "benchmark_model", _BENCHMARK)


def calls(program: Path) -> list[dict[str, str]]:
    """Return the options of every call but those for help."""
    lines = (program.parent / "calls").read_text().splitlines()
    found = [dict(word.partition("=")[::2] for word in line.split()) for line in lines]
    return [call for call in found if "--help" not in call]  # type: ignore[misc]


def _program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable} -SE\n{text}")
    path.chmod(0o755)
    return path
