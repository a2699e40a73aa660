import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src" / "moonlet"


def folders() -> set[str]:
    """Folders of the package that hold at least one file."""
    return {
        path.name
        for path in SOURCES.iterdir()
        if path.is_dir()
        and path.name != "__pycache__"
        and any(x.is_file() and "__pycache__" not in x.parts for x in path.rglob("*"))
    }


def test_the_page_has_one_line_for_each_folder() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)/` \| (.+) \|$", page, re.MULTILINE)
    names = [name for name, _ in rows]
    assert len(names) == len(set(names))
    assert set(names) == folders()
    assert all(sentence.endswith(".") for _, sentence in rows)


def test_every_python_folder_is_a_package() -> None:
    sources = {path.parent for path in SOURCES.rglob("*.py")}
    assert {path for path in sources if not (path / "__init__.py").is_file()} == set()


def test_every_page_is_in_the_index() -> None:
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text()
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", index))
    pages = {p.relative_to(docs).as_posix() for p in docs.rglob("*.md")} - {"README.md"}
    assert linked == pages


def test_links_between_pages_lead_somewhere() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    broken = [
        f"{page.name}: {target}"
        for page in pages
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_every_variable_is_documented() -> None:
    read = set(re.findall(r"MOONLET_[A-Z_]+", (SOURCES / "core" / "env.py").read_text()))
    page = (ROOT / "docs" / "environment.md").read_text()
    assert read <= set(re.findall(r"^\| `(MOONLET_[A-Z_]+)`", page, re.MULTILINE))


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
