"""The immutable table, against a dict."""

from __future__ import annotations

import pytest

from lightning_ft.membership.table import Table


def test_changes_leave_the_original_alone() -> None:
    """Each change makes a new table."""
    empty: Table[int] = Table()
    one = empty.with_item("0/0", 1)
    two = one.with_items([("0/1", 2), ("0/0", 3)])
    assert dict(empty) == {}
    assert dict(one) == {"0/0": 1}
    assert dict(two) == {"0/0": 3, "0/1": 2}
    assert two.without("0/0") == {"0/1": 2}
    assert len(two) == 2


def test_many_items_behave_as_in_a_dict() -> None:
    """Every shard is hit, with replaced and removed keys."""
    table: Table[int] = Table((f"{i}/0", i) for i in range(500))
    model = {f"{i}/0": i for i in range(500)}
    for i in range(0, 500, 3):
        table, model[f"{i}/0"] = table.with_item(f"{i}/0", -i), -i
    for i in range(1, 500, 7):
        table = table.without(f"{i}/0")
        del model[f"{i}/0"]
    assert table == model
    assert len(table) == len(model)
    assert sorted(table.scan()) == sorted(model.values())
    assert "1/0" not in table
    with pytest.raises(KeyError):
        table["1/0"]
