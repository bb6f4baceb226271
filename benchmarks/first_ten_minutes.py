"""A newcomer's first minutes: clone, `make demo`, every command of the README, its Python code, and the tutorial.

    python benchmarks/first_ten_minutes.py --folder newcomer --page docs/benchmarks/first-ten-minutes.md

The commands are read from the README and the code from the tutorial, so what is documented is what is run: in this
order, with all defaults, each once. The environment and all caches are made in the folder; a folder of an interrupted
run is continued with the next step. The folder photos/ that the README names is made of the two photographs that
scikit-learn contains. ``--offline`` leaves out what needs downloaded weights. ``--files DIR`` has the files that the
README's Python code reads.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

_REPOSITORY = Path(__file__).resolve().parents[1]
_GOAL = 15 * 60
_CROPS = """
from pathlib import Path
from PIL import Image
from sklearn.datasets import load_sample_images
Path("photos").mkdir()
for i, picture in enumerate(load_sample_images().images):
    for row in range(4):
        for column in range(6):
            crop = Image.fromarray(picture).crop((100 * column, 100 * row, 100 * column + 140, 100 * row + 127))
            crop.save(f"photos/{i}{row}{column}.jpg")
"""


@dataclass(frozen=True)
class Step:
    """Something that the newcomer does.

    Attributes:
        name: What the page shows.
        command: What the shell runs; "" where it is left out.
        left_out: Why it is left out.
    """

    name: str
    command: str
    left_out: str = ""


@dataclass(frozen=True)
class Outcome:
    """What became of a step; CPU seconds are those of all its processes."""

    name: str
    code: int
    seconds: float
    cpu_seconds: float
    output: str
    errors: str


def shell_commands(text: str) -> list[str]:
    """Return the commands of the shell blocks of a page, without comments."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, flags=re.S | re.M)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in (shlex.join(shlex.split(line, comments=True)) for line in lines) if line]


def python_code(text: str) -> str:
    """Return the Python blocks of a page as one script."""
    return "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.S | re.M))


def steps_of(clone: Path, offline: bool, files: Path | None) -> list[Step]:
    """Return the steps after the clone; the scripts and pictures for them are written beside the code."""
    readme = (clone / "README.md").read_text()
    (clone / "readme.py").write_text(python_code(readme))
    (clone / "tutorial.py").write_text(python_code((clone / "docs" / "guide" / "tutorial.md").read_text()))
    (clone / "crops.py").write_text(_CROPS)
    for file in files.iterdir() if files else ():
        shutil.copy(file, clone)
    found = []
    for command in shell_commands(readme):
        if command.startswith(("make test", "pip install", "git clone")):
            continue  # the tests have a page of their own (CONTRIBUTING.md); make demo has installed the package
        if "imagefolder:imagenet" in command:
            found.append(Step(command, "", "needs ImageNet"))
        elif "--pretrained" in command and offline:
            found.append(Step(f"{command} (here with random weights)", command.replace(" --pretrained", "")))
        else:
            found.append(Step(command, command))
    code = Step("the Python code of the README", "python readme.py")
    if files is None:
        code = Step(code.name, "", "needs its weights and CIFAR-10, see --files")
    demo, *others = found
    pictures = Step("photos/: 48 crops of the two photographs of scikit-learn", "python crops.py")
    return [demo, pictures, code, *others, Step("the code of docs/guide/tutorial.md", "python tutorial.py")]


def run(step: Step, folder: Path, environment: dict[str, str]) -> Outcome:
    """Run a step once, and keep what it printed."""
    print(f"$ {step.command}", file=sys.stderr, flush=True)
    begin, before = time.perf_counter(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    done = subprocess.run(
        step.command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip  # from our own documents
    seconds = time.perf_counter() - begin
    print(f"  exit {done.returncode} after {seconds:.0f} s", file=sys.stderr, flush=True)
    cpu = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    return Outcome(step.name, done.returncode, seconds, cpu, done.stdout.strip(), done.stderr.strip())


def page(outcomes: list[Outcome], left_out: list[Step], note: str, offline: bool) -> str:
    """Return the page: a table of all steps, and what each printed."""
    total, cpu = sum(o.seconds for o in outcomes), sum(o.cpu_seconds for o in outcomes)
    failed = [o for o in outcomes if o.code]
    goals = "the goal is met" if total <= _GOAL and not failed else "the goal is missed"
    lines = [
        "# The first ten minutes",
        "",
        "**Question.** Does everything work for a newcomer, at the first try and with all defaults?",
        "",
        f"**Conclusion.** {len(outcomes) - len(failed)} of {len(outcomes)} steps ended with exit code 0. They took "
        f"{total / 60:.1f} minutes with the installation, and {cpu / 60:.1f} minutes of CPU time. The goal is: no "
        f"failure, no second try, under {_GOAL // 60} minutes; {goals}.",
        "",
        "| step | seconds | CPU seconds | exit code |",
        "|---|---|---|---|",
        *(f"| {_cell(o.name)} | {o.seconds:.0f} | {o.cpu_seconds:.0f} | {o.code} |" for o in outcomes),
        "",
        *(f"Left out: {_cell(step.name)}, which {step.left_out}.\n" for step in left_out),
        "## What was printed",
        "",
    ]
    for o in outcomes:
        if o.output or o.code:
            shown = o.output if o.code == 0 else f"{o.output}\n{o.errors}".strip()
            lines += [f"### {_cell(o.name)}", "", "```text", shown, "```", ""]
    command = "python benchmarks/first_ten_minutes.py --folder newcomer --page docs/benchmarks/first-ten-minutes.md"
    command += " --offline" if offline else ""
    machine = f"{time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, Python {sys.version.split()[0]}"
    lines += [
        "## Method",
        "",
        f"{machine}. {note} A new clone, a new environment and empty caches; packages come from the package index or "
        "pip's cache. The commands are read from the README and the code from the tutorial, and each is run once.",
        "",
        "```bash",
        command,
        "```",
    ]
    return "\n".join(lines) + "\n"


def _cell(name: str) -> str:
    return f"`{name}`" if name.startswith(("dsa-hw", "make", "python", "git")) else name


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where to clone to")
    parser.add_argument("--page", type=Path, help="where to write the page")
    parser.add_argument("--offline", action="store_true", help="leave out what needs a download of weights")
    parser.add_argument("--files", type=Path, metavar="DIR", help="files that the README's Python code reads")
    parser.add_argument("--note", default="", help="what else the page says of the machine")
    parser.add_argument("--steps", type=int, metavar="N", help="stop after N more steps; repeat the command to go on")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    folder = args.folder.resolve()
    clone, state = folder / "dsa_hw", folder / "outcomes.json"
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"DSA_HW_CACHE": str(folder / "cache"), "PATH": f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"}
    outcomes = [Outcome(**row) for row in json.loads(state.read_text())] if state.exists() else []
    if not outcomes:
        outcomes.append(run(Step("git clone", f"git clone --quiet {_REPOSITORY} dsa_hw"), folder, environment))
        state.write_text(json.dumps([asdict(o) for o in outcomes]))
    steps = steps_of(clone, args.offline, args.files)
    for step in [step for step in steps if step.command][len(outcomes) - 1 :][: args.steps]:
        outcomes.append(run(step, clone, environment))
        state.write_text(json.dumps([asdict(o) for o in outcomes], indent=1))
    if args.page:
        text = page(outcomes, [step for step in steps if not step.command], args.note, args.offline)
        args.page.write_text(text.replace(str(folder), "FOLDER"))
    for o in outcomes:
        print(f"{o.seconds:7.1f} s  exit {o.code}  {o.name}")
    failed = sum(o.code != 0 for o in outcomes)
    total = sum(o.seconds for o in outcomes)
    print(f"{total / 60:.1f} minutes (goal: {_GOAL / 60:.0f}); {failed} of {len(outcomes)} steps failed")
    return int(failed > 0 or total > _GOAL)


if __name__ == "__main__":
    sys.exit(main())
