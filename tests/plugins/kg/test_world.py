"""The shipped graph of the world: its shape, its names, and facts that are easily mixed up."""

import csv
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from babel.core import get_cldr_version
from rows import each_row
from world_source import build_world_table, normalize_label

import rlx_plugins

WORLD = Path(rlx_plugins.__file__).parent / "kg" / "data" / "world.tsv"
RELATIONS = {"borders", "capital", "continent", "currency", "domain", "language"}
LABEL = re.compile(r"\.[a-z]{2}|[A-Za-z]+([ -][A-Za-z]+)*")


@dataclass(frozen=True, slots=True)
class World:
    kinds: dict[str, list[str]]
    labels: dict[str, list[str]]
    aliases: dict[str, list[str]]
    facts: list[tuple[str, str, str]]

    def known(self, country: str, relation: str) -> set[str]:
        """Labels of what a country, by label, stands in a relation to."""
        names = {entity: label for entity, (label,) in self.labels.items()}
        return {names[o] for s, r, o in self.facts if names[s] == country and r == relation}


@cache
def world() -> World:
    lines = [li for li in WORLD.read_text(encoding="utf-8").splitlines() if not li.startswith("#")]
    rows = [(s, r, o) for s, r, o in csv.reader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)]
    described: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for subject, relation, value in rows:
        described[relation][subject].append(value)
    return World(
        kinds=described["rlx:kind"],
        labels=described["rlx:label"],
        aliases=described["rlx:alias"],
        facts=[row for row in rows if not row[1].startswith("rlx:")],
    )


def of_kind(kind: str) -> set[str]:
    return {entity for entity, kinds in world().kinds.items() if kinds == [kind]}


def objects(relation: str) -> dict[str, list[str]]:
    """What every country, by id, stands in a relation to."""
    found: dict[str, list[str]] = {country: [] for country in of_kind("country")}
    for subject, name, value in world().facts:
        if name == relation:
            found[subject].append(value)
    return found


# Shape -------------------------------------------------------------------------------------------


def test_every_entity_has_one_kind_and_one_label_and_every_fact_is_about_a_country():
    used = {entity for s, _, o in world().facts for entity in (s, o)}
    assert used == world().kinds.keys() == world().labels.keys()
    assert world().aliases.keys() <= used
    assert all(len(values) == 1 for values in [*world().kinds.values(), *world().labels.values()])
    assert {relation for _, relation, _ in world().facts} == RELATIONS
    assert {subject for subject, _, _ in world().facts} == of_kind("country")
    assert len(set(world().facts)) == len(world().facts)


@each_row("relation", sorted(RELATIONS - {"borders"}))
def test_a_relation_leads_to_its_own_kind_and_every_country_has_it(relation):
    assert {o for values in objects(relation).values() for o in values} == of_kind(relation)
    assert all(objects(relation).values())


@each_row("relation", ["capital", "continent", "domain"])
def test_a_country_has_exactly_one(relation):
    assert {len(values) for values in objects(relation).values()} == {1}


@each_row("relation", ["capital", "domain"])
def test_no_two_countries_share_one(relation):
    assert len(of_kind(relation)) == len(of_kind("country")) == 196


def test_borders_are_symmetric_and_lead_elsewhere():
    borders = objects("borders")
    assert all(country in borders[other] for country, others in borders.items() for other in others)
    assert all(country not in others for country, others in borders.items())


# Names -------------------------------------------------------------------------------------------


def test_labels_are_plain_words():
    assert [label for (label,) in world().labels.values() if not LABEL.fullmatch(label)] == []


def test_every_name_means_one_entity():
    """Labels, aliases and ids, in any case: a question or an answer can never mean two things."""
    names = Counter(
        name
        for entity in world().labels
        for name in {
            n.casefold()
            for n in (entity, *world().labels[entity], *world().aliases.get(entity, ()))
        }
    )
    assert [name for name, count in names.items() if count > 1] == []


@each_row(
    ("alias", "label"),
    [
        ("Bogotá", "Bogota"),
        ("Côte d’Ivoire", "Ivory Coast"),
        ("São Tomé", "Sao Tome"),
        ("Trinidad & Tobago", "Trinidad and Tobago"),
        ("EUR", "Euro"),
        ("Burma", "Myanmar"),
        ("N'Djamena", "NDjamena"),
    ],
)
def test_other_names_are_kept(alias, label):
    assert [e for e, names in world().aliases.items() if alias in names] == [
        e for e, names in world().labels.items() if names == [label]
    ]


# Facts -------------------------------------------------------------------------------------------


@each_row(
    ("country", "relation", "labels"),
    [
        ("Australia", "capital", "Canberra"),
        ("Republic of the Congo", "capital", "Brazzaville"),
        ("South Korea", "capital", "Seoul"),
        ("Gambia", "borders", "Senegal"),
        ("Uruguay", "borders", "Argentina, Brazil"),
        ("Switzerland", "language", "French, German, Italian, Romansh"),
        ("Bulgaria", "currency", "Bulgarian Lev"),
        ("Panama", "currency", "Panamanian Balboa, US Dollar"),
        ("Turkey", "continent", "Asia"),
        ("United Kingdom", "domain", ".uk"),
    ],
)
def test_facts_that_are_easily_mixed_up(country, relation, labels):
    assert world().known(country, relation) == set(labels.split(", "))


# Sources -----------------------------------------------------------------------------------------


def test_the_file_is_what_the_builder_makes():
    text = WORLD.read_text(encoding="utf-8")
    assert re.search(r"Unicode CLDR (\S+)", text)[1] == get_cldr_version()
    assert build_world_table() == text


def test_a_name_that_is_no_label_is_refused():
    assert normalize_label("Chișinău") == "Chisinau"
    for name in ("Congo - Kinshasa", "Myanmar (Burma)", "Łódź", "</answer>", "", "A, B"):
        with pytest.raises(ValueError, match=r"no label; give it a better one in names\.tsv"):
            normalize_label(name)
