"""Edits of a configuration: keys are changed in place, or added next to keys of their table."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from moetune.domain.errors import InputError
from moetune.export.keys import Value
from moetune.launches.places import (
    LOADED,
    WORDS,
    Place,
    no_place,
    places_of,
    with_item,
    with_mapping,
    with_table,
    with_value,
    words_of,
)
from moetune.launches.reading import Given

Groups = Mapping[str, tuple[str, ...]]
"""Keys of each table, by its name."""


class _Item(NamedTuple):
    """An item's identity, which edits keep: its form, its keys, and its number among equals."""

    form: str
    leaf: str
    parents: str
    number: int


class KeyedText:
    """The text of a configuration, which is edited key by key."""

    def __init__(self, name: str, text: str, given: Mapping[str, Given], groups: Groups) -> None:
        """Locate each key in the text.

        Args:
            name: name of the file, whose ending gives its kind; other endings are scripts'.
            given: the keys of the configuration.
        """
        self.text = text
        self._name, self._given, self._groups = name, given, groups
        by_line = {(place.leaf, place.line): item for item, place in self._places().items()}
        self._items = {
            key: by_line[leaf, place.line]
            for key, place in given.items()
            if (leaf := place.written.rpartition(".")[2], place.line) in by_line
        }

    def change(self, key: str, value: Value) -> None:
        """Give a key another value, or add it; None takes it out.

        Raises:
            InputError: the text has neither the key nor another key of its table.
        """
        if key in self._items:
            self.text = with_value(self.text, self._places()[self._items[key]], value)
            if value is None:
                self._items = {name: item for name, item in self._items.items()
                               if item != self._items[key]}  # fmt: skip
        elif value is not None:
            self.text = self._add(key, value)
        elif key in self._given:
            raise no_place(key, value)

    def _places(self) -> dict[_Item, Place]:
        """Return the current place of each item."""
        places = places_of(self._name, self.text) or tuple(words_of(self.text, self._given))
        seen: dict[tuple[str, str, str], int] = {}
        items = {}
        for place in places:
            keys = (place.form, place.leaf, place.parents)
            seen[keys] = seen.get(keys, -1) + 1
            items[_Item(*keys, seen[keys])] = place
        return items

    def _add(self, key: str, value: Value) -> str:
        *above, leaf = key.split(".")
        places = self._places()
        if above:
            table = f"{'.'.join(above)}."
            inside = [place for place in places.values() if _is_in(place, table)]
            if inside:
                return with_item(self.text, inside[-1], leaf, value)
            if self._is_toml:
                return with_table(self.text, table.rstrip("."), leaf, value)
            word = next((place for place in places.values() if place.form in WORDS), None)
            if word is not None and word.parents == "--":  # its command has no dotted keys
                raise no_place(key, value)
            if word is not None:
                dashes = "--" if word.parents.startswith("--") else ""
                moved = word._replace(parents=f"{dashes}{table}")
                return with_item(self.text, moved, leaf, value)
            if self._is_yaml or len(above) > 1:
                raise no_place(key, value)
            leaf, value = above[0], {leaf: value}  # type: ignore[assignment] # a new table
        for sibling in self._siblings(key):
            place = places[self._items[sibling]]
            if place.form != "call" and (place.form != "keyword" or _takes_any(place)):
                return with_item(self.text, place, leaf, value)
        return self._in_new_table(key, value, places)

    def _siblings(self, key: str) -> Iterator[str]:
        """Yield the keys of the same table that the text has, the nearest first."""
        group = next((keys for keys in self._groups.values() if key in keys), ())
        ordered = sorted(group, key=lambda sibling: abs(group.index(sibling) - group.index(key)))
        for sibling in ordered:
            item = self._items.get(sibling)
            if item is not None and "." not in sibling and not _is_renamed(item.leaf, sibling):
                yield sibling

    def _in_new_table(self, key: str, value: Value, places: Mapping[_Item, Place]) -> str:
        loaded = [place for place in places.values() if place.leaf == LOADED]
        if loaded and key == "gradient_checkpointing":  # of a model, not of a configuration
            return with_item(self.text, loaded[0], f"{key}_enable", value)
        table = next((name for name, keys in self._groups.items() if key in keys), "")
        if table and self._is_toml:
            return with_table(self.text, table, key, value)
        if self._is_yaml and table.endswith("_config"):  # as accelerate names its tables
            return with_mapping(self.text, table, key, value, places.values())
        for item in self._items.values():
            place = places[item]
            root = place.parents.rstrip(".").rpartition(".")[0]
            if table and place.form in ("statement", "override") and (root or place.parents):
                moved = place._replace(parents=f"{root}.{table}." if root else f"{table}.")
                return with_item(self.text, moved, key, value)
        raise no_place(key, value)

    @property
    def _is_toml(self) -> bool:
        return self._name.endswith(".toml")

    @property
    def _is_yaml(self) -> bool:
        return self._name.endswith((".yaml", ".yml"))


def _is_in(place: Place, table: str) -> bool:
    parents = place.parents.lstrip("{")
    return parents == table or parents.endswith(f".{table}")


def _is_renamed(leaf: str, key: str) -> bool:
    """Return whether a file writes a key with a prefix, which a new key would need, too."""
    return leaf != key and leaf.endswith(f"_{key}")


def _takes_any(place: Place) -> bool:
    """Return whether a call makes a configuration; a function may not have the argument."""
    return place.parents.rstrip(".").rpartition(".")[2][:1].isupper()


def keyed_text(
    name: str, text: str, given: Mapping[str, Given], groups: Groups, changes: Mapping[str, Value]
) -> str:
    """Return a configuration's text with changes.

    Raises:
        InputError: the text has no key of the table, or the key is in another file or after `--`.
    """
    edited = KeyedText(name, text, given, groups)
    for key, value in changes.items():
        place = given.get(key)
        if place is not None and not place.line:
            where = f"in {place.file}" if place.file else "behind --"
            raise InputError(f"{place.written} stands {where}", f"write {value} there by hand")
        edited.change(key, value)
    return edited.text
