"""How busy this computer is."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from profilers import machine


@pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="no /proc here")
def test_names_of_processes_have_no_control_characters() -> None:
    """A process chooses its name."""
    script = (
        "import sys; open('/proc/self/comm', 'wb').write(b'\\x1b[2J)\\xff\\n(x'); print('ready', flush=True); "
        "sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-SE", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        name, ticks = machine._processor_times()[process.pid]
    assert name == "?[2J)\ufffd (x"
    assert ticks >= 0
