import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

FENCE = r"^```python test\n(.*?)^```$"


def blocks() -> dict[str, str]:
    """The fenced blocks that say `python test`, by page and number."""
    found = {}
    for page in PAGES:
        texts = re.findall(
            r"^```python test\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE
        )
        for number, text in enumerate(texts):
            found[f"{page.relative_to(ROOT)}-{number}"] = text
    return found


@pytest.mark.parametrize("name", blocks())
def test_a_block_of_the_documentation_runs(name: str) -> None:
    command = [sys.executable, "-W", "error", "-c", blocks()[name]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout
