"""The shipped graph of the world: its shape, its names, and facts that are easily mixed up."""

import csv
import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from babel.core import get_cldr_version, get_global
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


@pytest.mark.parametrize("relation", sorted(RELATIONS - {"borders"}))
def test_a_relation_leads_to_its_own_kind_and_every_country_has_it(relation):
    assert {o for values in objects(relation).values() for o in values} == of_kind(relation)
    assert all(objects(relation).values())


@pytest.mark.parametrize("relation", ["capital", "continent", "domain"])
def test_a_country_has_exactly_one(relation):
    assert {len(values) for values in objects(relation).values()} == {1}


@pytest.mark.parametrize("relation", ["capital", "domain"])
def test_no_two_countries_share_one(relation):
    assert len(of_kind(relation)) == len(of_kind("country")) == 196


def test_borders_are_symmetric_and_lead_elsewhere():
    borders = objects("borders")
    assert all(country in borders[other] for country, others in borders.items() for other in others)
    assert all(country not in others for country, others in borders.items())


def test_borders_join_neighbours_of_one_landmass():
    """Nobody borders across an ocean: of the continents, only these pairs touch on land."""
    continent = {country: values[0] for country, values in objects("continent").items()}
    touching = {
        frozenset((continent[country], continent[other]))
        for country, others in objects("borders").items()
        for other in others
    }
    pairs = [
        *({"africa", "asia"}, {"africa", "europe"}, {"asia", "europe"}, {"asia", "oceania"}),
        *({"north-america", "south-america"}, {"africa"}, {"asia"}, {"europe"}),
        *({"north-america"}, {"south-america"}),
    ]
    assert touching == {frozenset(f"continent/{name}" for name in pair) for pair in pairs}


def test_islands_border_nobody_but_who_shares_the_island():
    alone = {
        *("Australia", "Bahamas", "Bahrain", "Cuba", "Cyprus", "Fiji", "Iceland", "Jamaica"),
        *("Japan", "Madagascar", "Maldives", "Malta", "Mauritius", "New Zealand", "Philippines"),
        *("Sao Tome and Principe", "Seychelles", "Singapore", "Sri Lanka", "Taiwan", "Tonga"),
    }
    assert all(world().known(country, "borders") == set() for country in alone)
    shared = [("Haiti", "Dominican Republic"), ("Ireland", "United Kingdom")]
    shared += [
        ("Timor-Leste", "Indonesia"),
        ("Papua New Guinea", "Indonesia"),
        ("Brunei", "Malaysia"),
    ]
    assert all(world().known(country, "borders") == {other} for country, other in shared)


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


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
    ("country", "capital"),
    [
        ("Australia", "Canberra"),
        ("Austria", "Vienna"),
        ("Benin", "Porto-Novo"),
        ("Bolivia", "Sucre"),
        ("Brazil", "Brasilia"),
        ("Burundi", "Gitega"),
        ("Canada", "Ottawa"),
        ("DR Congo", "Kinshasa"),
        ("Dominica", "Roseau"),
        ("Dominican Republic", "Santo Domingo"),
        ("Equatorial Guinea", "Malabo"),
        ("Guinea", "Conakry"),
        ("Guinea-Bissau", "Bissau"),
        ("Guyana", "Georgetown"),
        ("Ivory Coast", "Yamoussoukro"),
        ("Jamaica", "Kingston"),
        ("Kazakhstan", "Astana"),
        ("Mali", "Bamako"),
        ("Malawi", "Lilongwe"),
        ("Myanmar", "Naypyidaw"),
        ("Netherlands", "Amsterdam"),
        ("Niger", "Niamey"),
        ("Nigeria", "Abuja"),
        ("North Korea", "Pyongyang"),
        ("Republic of the Congo", "Brazzaville"),
        ("Saint Vincent and the Grenadines", "Kingstown"),
        ("Slovakia", "Bratislava"),
        ("Slovenia", "Ljubljana"),
        ("South Korea", "Seoul"),
        ("Switzerland", "Bern"),
        ("Tanzania", "Dodoma"),
        ("Turkey", "Ankara"),
    ],
)
def test_capitals(country, capital):
    assert world().known(country, "capital") == {capital}


@pytest.mark.parametrize(
    ("country", "neighbours"),
    [
        ("France", "Andorra, Belgium, Germany, Italy, Luxembourg, Monaco, Spain, Switzerland"),
        ("Gambia", "Senegal"),
        ("Lesotho", "South Africa"),
        ("Liechtenstein", "Austria, Switzerland"),
        ("Mongolia", "China, Russia"),
        ("Portugal", "Spain"),
        ("Qatar", "Saudi Arabia"),
        ("South Korea", "North Korea"),
        ("United States", "Canada, Mexico"),
        ("Uruguay", "Argentina, Brazil"),
        ("Uzbekistan", "Afghanistan, Kazakhstan, Kyrgyzstan, Tajikistan, Turkmenistan"),
        ("Zambia", "Angola, Botswana, DR Congo, Malawi, Mozambique, Namibia, Tanzania, Zimbabwe"),
    ],
)
def test_borders(country, neighbours):
    assert world().known(country, "borders") == set(neighbours.split(", "))


@pytest.mark.parametrize(
    ("country", "relation", "labels"),
    [
        ("Austria", "language", "German"),
        ("Brazil", "language", "Portuguese"),
        ("Canada", "language", "English, French"),
        ("Suriname", "language", "Dutch"),
        ("Switzerland", "language", "French, German, Italian, Romansh"),
        ("Ukraine", "language", "Ukrainian"),
        ("United States", "language", "English"),
        ("Bulgaria", "currency", "Bulgarian Lev"),
        ("Croatia", "currency", "Euro"),
        ("Denmark", "currency", "Danish Krone"),
        ("Ecuador", "currency", "US Dollar"),
        ("Liechtenstein", "currency", "Swiss Franc"),
        ("Panama", "currency", "Panamanian Balboa, US Dollar"),
        ("Senegal", "currency", "West African CFA Franc"),
        ("Gabon", "currency", "Central African CFA Franc"),
        ("Sweden", "currency", "Swedish Krona"),
        ("Egypt", "continent", "Africa"),
        ("Guyana", "continent", "South America"),
        ("Panama", "continent", "North America"),
        ("Papua New Guinea", "continent", "Oceania"),
        ("Russia", "continent", "Europe"),
        ("Turkey", "continent", "Asia"),
        ("Australia", "domain", ".au"),
        ("Austria", "domain", ".at"),
        ("Chad", "domain", ".td"),
        ("Switzerland", "domain", ".ch"),
        ("United Kingdom", "domain", ".uk"),
    ],
)
def test_languages_currencies_continents_and_domains(country, relation, labels):
    assert world().known(country, relation) == set(labels.split(", "))


# Sources -----------------------------------------------------------------------------------------


def test_the_file_is_what_the_builder_makes():
    text = WORLD.read_text(encoding="utf-8")
    assert re.search(r"Unicode CLDR (\S+)", text)[1] == get_cldr_version()
    assert build_world_table() == text


def test_continents_are_those_of_the_time_zones():
    """A second source: zones are named by continents, or by oceans, which tell nothing."""
    areas = {
        "Africa": {"africa"},
        "America": {"north-america", "south-america"},
        "Asia": {"asia"},
        "Australia": {"oceania"},
        "Europe": {"europe"},
        "Pacific": {"oceania"},
    }
    odd, compared = set(), 0
    for country, (continent,) in objects("continent").items():
        zones = get_global("territory_zones")[country.removeprefix("country/").upper()]
        told = {name for zone in zones for name in areas.get(zone.split("/")[0], ())}
        compared += bool(told)
        if told and continent.removeprefix("continent/") not in told:
            odd.add(country)
    assert compared > 180
    assert odd == {"country/tr"}  # the zone is named after Istanbul, on the European side


def test_a_name_that_is_no_label_is_refused():
    assert normalize_label("Chișinău") == "Chisinau"
    for name in ("Congo - Kinshasa", "Myanmar (Burma)", "Łódź", "</answer>", "", "A, B"):
        with pytest.raises(ValueError, match=r"no label; give it a better one in names\.tsv"):
            normalize_label(name)
