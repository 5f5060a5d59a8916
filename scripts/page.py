"""Pages drawn from result rows: what stands between two markers is made anew, or checked.

A page is Markdown that people write, with a section for the results; nobody types a number into that.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphs.errors import InputError
from graphs.files import read_text, write_whole

from .output import ended
from .rows import read_rows
from .sweep import Row, key_of

ROOT = Path(__file__).resolve().parents[1]
END = "<!-- end of results -->"
OUT_OF_DATE = 2


def latest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each cell; of a graph that was captured anew, and is another one now, only rows of the last."""
    found = [(key, row) for row in rows if (key := key_of(row)) is not None]
    newest = {row["graph"]: row["fingerprint"] for _, row in found}
    return list({key: row for key, row in found if row["fingerprint"] == newest[row["graph"]]}.values())


def table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (header, ["---"] * len(header), *lines))


def percent(share: float | None) -> str:
    """ "1.23 %", or a dash."""
    return "-" if share is None else f"{share:.2%}".replace("%", " %")


def with_section(page: Path, begin: str, section: str) -> str:
    """The page's text with ``section``, its markers ``begin`` and END included, in place of the one there.

    Raises InputError where there is none.
    """
    before, marker, rest = read_text(page).partition(begin)
    _, end, after = rest.partition(END)
    if not marker or not end:
        raise InputError(f"{page} has no section between {begin!r} and {END!r}")
    return before + section + after


def publish(pages: Mapping[Path, str], *, check: bool) -> int:
    """Write pages, or with ``check`` only look at them; the exit code, OUT_OF_DATE where a check finds another text."""
    if check:
        return 0 if all(path.exists() and read_text(path) == text for path, text in pages.items()) else OUT_OF_DATE
    for path, text in pages.items():
        write_whole(path, text)
    return 0


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A command line with ``--check``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help=f"change nothing; exit code {OUT_OF_DATE} where out of date")
    return parser


def page_of_rows(
    argv: Sequence[str] | None,
    *,
    name: str,
    description: str | None,
    begin: str,
    having: Collection[str],
    results: Callable[[Sequence[Row], str], str],
    draw: Callable[[Sequence[Row], str], Any],
) -> int:
    """The command line of ``docs/NAME.md`` and ``docs/NAME.png``, drawn from ``benchmarks/NAME.jsonl``; the exit code.

    having   entries of every row, beside those of a sweep
    results  the section, markers included, from the last row of each cell and the name of the picture
    draw     the picture, to a path; not asked for where no row has a schedule
    """
    parser = parser_of(description)
    parser.add_argument("--rows", default=str(ROOT / "benchmarks" / f"{name}.jsonl"), help="rows of the benchmark")
    parser.add_argument("--page", default=str(ROOT / "docs" / f"{name}.md"), help="page with the markers")
    arguments = parser.parse_args(argv)
    page = Path(arguments.page)
    picture = page.with_suffix(".png")

    def work() -> int:
        rows = latest(read_rows(arguments.rows, ("graph", *having)))
        if not rows:  # nothing to put in place of what is on the page
            raise InputError(f"{arguments.rows} holds no rows of bench_{name}")
        code = publish({page: with_section(page, begin, results(rows, picture.name))}, check=arguments.check)
        if not arguments.check and any(row["time_ns"] is not None for row in rows):
            draw(rows, str(picture))
        return code

    return ended(f"{name}_doc", work)
