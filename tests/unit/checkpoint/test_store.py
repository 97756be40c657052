"""Opening a store: which driver it gets, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_ft.checkpoint.store import open_store
from lightning_ft.checkpoint.stores.local import LocalStore
from lightning_ft.checkpoint.stores.remote import MemoryStore


def test_a_path_is_local_however_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative, with a tilde, as a URL: the same directory, which is not made before something is written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for url in ("run", "./run/", "~/run", str(tmp_path / "run"), f"file://{tmp_path}/run", f"local://{tmp_path}/run"):
        store = open_store(url)
        assert isinstance(store, LocalStore)
        assert store.url == str(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    store.create("a", [b"x"])
    assert (tmp_path / "run" / "a").read_bytes() == b"x"


def test_a_store_in_memory_outlives_its_object() -> None:
    """All stores of a process at one URL are the same place."""
    assert isinstance(open_store("memory://test-open"), MemoryStore)
    open_store("memory://test-open/run").create("a", [b"x"])
    assert open_store("memory://test-open/run").list("") == ["a"]


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("", {}, "needs a directory"),
        ("s3://", {}, "needs a URL with a directory"),
        ("simplecache::s3://bucket/run", {}, "in front of another one"),
        ("/tmp/run", {"endpoint_url": "x"}, "takes no storage options"),  # noqa: S108 - nothing is made
        ("/tmp/run", {"timeout_s": 0}, "timeout_s must be above 0"),  # noqa: S108
        ("nonsense://bucket/run", {}, "nonsense"),
    ],
)
def test_a_url_that_names_no_store_is_refused(url: str, options: dict[str, object], message: str) -> None:
    """The error says what is wrong with which value."""
    with pytest.raises(ValueError, match=message):
        open_store(url, **options)  # type: ignore[arg-type]


def test_a_missing_package_is_named() -> None:
    """Whoever lacks the package for a storage is told which one it is."""
    with pytest.raises(ImportError, match=r"can't open sftp://host/run: .*paramiko"):
        open_store("sftp://host/run")
