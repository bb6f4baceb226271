"""JSON Schemas of the files and of what ``--json`` prints; ``python docs/schemas.py`` writes them again."""

from __future__ import annotations

import json
from pathlib import Path

from budgets.model_document import CostModelDocument
from budgets.technology_document import TechnologyDocument
from dsa_hw.channels.plan import PlanDocument
from dsa_hw.cli.documents import OUTPUTS
from dsa_hw.experiments.compare import ComparisonRowDocument
from dsa_hw.experiments.front import SweepRowDocument
from dsa_hw.experiments.minimize import MinimumRowDocument
from dsa_hw.experiments.run_folder import RunFileDocument
from dsa_hw.pipeline.certificate import CertificateDocument
from dsa_hw.utils.documents import Document

SCHEMAS: dict[str, type[Document]] = {
    "certificate": CertificateDocument,
    "cost-model": CostModelDocument,
    "plan": PlanDocument,
    "comparison-row": ComparisonRowDocument,
    "minimum-row": MinimumRowDocument,
    "run-file": RunFileDocument,
    "sweep-row": SweepRowDocument,
    "technology": TechnologyDocument,
    **{f"output-{name}": output for name, output in OUTPUTS.items()},
}
"""Name of the format -> class; each becomes ``docs/reference/schemas/NAME.schema.json``."""

FOLDER = Path(__file__).parent / "reference" / "schemas"


def schema_text(schema: type[Document]) -> str:
    """Return the JSON Schema of a document."""
    content = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema.model_json_schema()}
    return json.dumps(content, indent=1) + "\n"


def main() -> None:
    """Write the schema of each format."""
    FOLDER.mkdir(exist_ok=True)
    for name, schema in SCHEMAS.items():
        (FOLDER / f"{name}.schema.json").write_text(schema_text(schema))


if __name__ == "__main__":
    main()
