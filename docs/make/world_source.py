"""Builds the shipped graph, `data/world.tsv`, from hand-written files and Unicode CLDR.

    python docs/make/world_source.py

The files `countries.tsv` (capitals, continents, borders), `names.tsv` (labels and aliases) and
`corrections.tsv` (replacements for lists of CLDR) are hand-written. Everything else is from CLDR,
read with Babel, which only this module needs. `world.md` beside them describes the rules.
"""

import csv
import re
import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

from babel import Locale
from babel.core import get_cldr_version
from babel.languages import get_official_languages
from babel.numbers import get_currency_name, get_territory_currencies

import rlx_plugins

__all__ = ["WORLD", "build_world_table"]

DATA = Path(rlx_plugins.__file__).parent / "kg" / "data"
WORLD = DATA / "world.tsv"

AS_OF = date(2025, 7, 1)
"""Date for which currencies are selected, so that builds are reproducible."""

HEADER = """\
# The world: {facts} facts about {countries} countries in the middle of 2025. Made by
# docs/make/world_source.py; never edit by hand.
# Capitals, continents and borders are from countries.tsv. Names, languages and currencies are from
# Unicode CLDR {cldr} (LICENSE.unicode), changed by names.tsv and corrections.tsv.
"""

NONE = "-"
ENGLISH = Locale("en")

Row = tuple[str, str, str]
"""Subject, relation, object; the relations `rlx:kind`, `rlx:label` and `rlx:alias` describe."""
Names = Mapping[str, tuple[str, tuple[str, ...]]]
"""The content of `names.tsv`, by id: a label, or `-` to keep the original one, and aliases."""


@dataclass(frozen=True, slots=True)
class Entity:
    """An entity of the graph.

    Attributes:
        id: a stable id, such as `city/paris`.
        kind: the kind, such as `capital`.
        name: the original name, with accents.
        aliases: other unambiguous names.
    """

    id: str
    kind: str
    name: str
    aliases: tuple[str, ...] = ()

    def rows(self, better: Names) -> Iterator[Row]:
        """Yields its kind, label and aliases, with the changes of `names.tsv`."""
        name, others = better.get(self.id, (NONE, ()))
        name = self.name if name == NONE else name
        label = normalize_label(name)
        yield self.id, "rlx:kind", self.kind
        yield self.id, "rlx:label", label
        for alias in {name, *self.aliases, *others} - {label}:
            yield self.id, "rlx:alias", alias


@dataclass(frozen=True, slots=True)
class Country:
    """A row of `countries.tsv`; borders are codes of other rows."""

    code: str
    capital: str
    continent: str
    borders: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"country/{self.code.lower()}"


def normalize_label(name: str) -> str:
    """Converts a name into a label: words of ASCII letters, or a domain such as `.fr`.

    Raises:
        ValueError: it cannot be converted; `names.tsv` must give a better name.
    """
    decomposed = unicodedata.normalize("NFKD", name.replace("&", "and"))
    label = re.sub(r"[\u0300-\u036f'’ʻ]", "", decomposed)
    if not re.fullmatch(r"\.[a-z]{2}|[A-Za-z]+([ -][A-Za-z]+)*", label):
        raise ValueError(f"{name!r} is no label; give it a better one in names.tsv")
    return label


def format_slug(name: str) -> str:
    return normalize_label(name).lower().replace(" ", "-")


def read_data_table(name: str) -> list[dict[str, str]]:
    """Reads a hand-written file of the data folder; lines that begin with `#` are comments."""
    lines = (DATA / name).read_text(encoding="utf-8").splitlines()
    kept = [line for line in lines if not line.startswith("#")]
    return list(csv.DictReader(kept, delimiter="\t", quoting=csv.QUOTE_NONE))


def split_list_cell(text: str, separator: str) -> tuple[str, ...]:
    return () if text == NONE else tuple(text.split(separator))


def read_countries() -> list[Country]:
    return [
        Country(row["code"], row["capital"], row["continent"], split_list_cell(row["borders"], " "))
        for row in read_data_table("countries.tsv")
    ]


@cache
def read_corrections() -> dict[tuple[str, str], list[str]]:
    """Returns the replacements for CLDR's lists, by country code and relation."""
    rows = read_data_table("corrections.tsv")
    return {(row["code"], row["relation"]): row["objects"].split() for row in rows}


def read_label_names() -> Names:
    return {
        row["id"]: (row["label"], split_list_cell(row["aliases"], "; "))
        for row in read_data_table("names.tsv")
    }


def list_country_languages(code: str) -> list[str]:
    """Codes of a country's official languages; de facto ones if CLDR has no legal ones."""
    found = get_official_languages(code) or get_official_languages(code, de_facto=True)
    return sorted({language.split("_")[0] for language in found})  # zh_Hant and zh are one language


def list_country_currencies(code: str) -> list[str]:
    """Codes of the currencies that were legal tender on `AS_OF`."""
    return [currency.lower() for currency in get_territory_currencies(code, AS_OF)]


def list_country_facts(country: Country) -> Iterator[tuple[str, Entity]]:
    """Yields the facts about a country except its borders, as relation and object."""
    yield "capital", Entity(f"city/{format_slug(country.capital)}", "capital", country.capital)
    continent = country.continent
    yield "continent", Entity(f"continent/{format_slug(continent)}", "continent", continent)
    domain = "uk" if country.code == "GB" else country.code.lower()
    yield "domain", Entity(f"domain/{domain}", "domain", f".{domain}")
    corrected = read_corrections()
    for code in corrected.get((country.code, "language")) or list_country_languages(country.code):
        name = ENGLISH.languages.get(code, f"<{code}>")  # no label: names.tsv must have one
        yield "language", Entity(f"language/{code}", "language", name)
    for code in corrected.get((country.code, "currency")) or list_country_currencies(country.code):
        name = get_currency_name(code.upper(), locale=ENGLISH)
        yield "currency", Entity(f"currency/{code}", "currency", name, (code.upper(),))


def build_world_table() -> str:
    """Returns the text of `world.tsv`, reproducible for the same files and CLDR version.

    Raises:
        ValueError: a name is not a valid label, or a file refers to something not in the world.
    """
    entities: set[Entity] = set()
    facts: set[Row] = set()
    listed = read_countries()
    for country in listed:
        entities.add(Entity(country.id, "country", ENGLISH.territories[country.code]))
        facts |= {(country.id, "borders", f"country/{code.lower()}") for code in country.borders}
        for relation, entity in list_country_facts(country):
            entities.add(entity)
            facts.add((country.id, relation, entity.id))
    better = read_label_names()
    if strays := better.keys() - {entity.id for entity in entities}:
        raise ValueError(f"names.tsv names what is not in the world: {sorted(strays)}")
    correctable = {(country.code, name) for country in listed for name in ("currency", "language")}
    if misses := read_corrections().keys() - correctable:
        raise ValueError(f"corrections.tsv corrects what is not there: {sorted(misses)}")
    header = HEADER.format(facts=len(facts), countries=len(listed), cldr=get_cldr_version())
    rows = facts | {row for entity in entities for row in entity.rows(better)}
    return header + "".join("\t".join(row) + "\n" for row in sorted(rows))


if __name__ == "__main__":
    WORLD.write_text(build_world_table(), encoding="utf-8")
