"""The pages of `docs/estimators/` say what the code says."""

from estimator_pages import FOLDER, index, names, page, picture
from rows import each_row


@each_row("name", names())
def test_a_page_is_what_make_docs_writes(name):
    assert (FOLDER / f"{name}.md").read_text() == page(name), "run `make docs`"


@each_row("name", names())
def test_a_picture_shows_the_numbers_of_today(name, tmp_path):
    picture(name, tmp_path / "now.svg")
    texts = [_texts(path) for path in (FOLDER / f"{name}.svg", tmp_path / "now.svg")]
    assert texts[0] == texts[1], "run `make docs`"


def _texts(path):
    return [line.strip() for line in path.read_text().splitlines() if "<text" in line]


def test_every_estimator_is_in_the_table_and_nothing_else_lies_there():
    assert (FOLDER / "README.md").read_text() == index(), "run `make docs`"
    expected = {f"{name}.{kind}" for name in names() for kind in ("md", "svg")} | {"README.md"}
    assert {path.name for path in FOLDER.iterdir()} == expected
