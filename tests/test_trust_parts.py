"""The parts of megarl.config.trust one by one: who may have written a file, and which keys count."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config.trust import PLUGS, POWERS, find_stranger, require_trust, safe_environment
from megarl.errors import ConfigError

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
ME, OTHER = 12345, 54321


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file in a folder, seen by a user who is not root; both are the user's."""
    made = tmp_path / "folder" / "run.toml"
    made.parent.mkdir(mode=0o755)
    made.touch(0o644)
    for place in (made.parent, made):
        os.chown(place, ME, ME)
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    return made


@pytest.mark.parametrize(("owner", "is_trusted"), [(ME, True), (0, True), (1, False), (OTHER, False)])
@pytest.mark.parametrize("is_folder", [True, False])
def test_the_user_and_root_alone_are_no_strangers(file: Path, owner: int, is_trusted: bool, is_folder: bool) -> None:
    place = file.parent if is_folder else file
    os.chown(place, owner, -1)
    assert find_stranger(file) == (None if is_trusted else f"{place} belongs to user {owner}")


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_others_can_write_is_a_strangers(file: Path, is_folder: bool) -> None:
    place = file.parent if is_folder else file
    for mode in (0o700, 0o744, 0o755, 0o711):
        place.chmod(mode)
        assert find_stranger(file) is None
    for mode in (0o702, 0o757, 0o720, 0o775, 0o1777):
        place.chmod(mode)
        assert find_stranger(file) == f"others can write {place}"


def test_a_group_of_the_users_own_may_write(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(gr_name="me", gr_mem=[])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: group)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me"))
    file.chmod(0o664)
    assert find_stranger(file) is None
    for members, name, is_private in ((["me"], "me", True), (["me", "you"], "me", False), ([], "us", False)):
        group.gr_mem, group.gr_name = members, name
        assert (find_stranger(file) is None) == is_private
    file.chmod(0o666)
    assert find_stranger(file) is not None


def test_a_link_does_not_hide_where_the_file_is(file: Path, tmp_path: Path) -> None:
    link = tmp_path / "mine" / "run.toml"
    link.parent.mkdir(mode=0o755)
    link.symlink_to(file)
    assert find_stranger(link) is None
    for place in (file, file.parent, link.parent):
        os.chown(place, OTHER, -1)
        assert find_stranger(link) == f"{place} belongs to user {OTHER}"
        os.chown(place, ME, -1)


@pytest.mark.parametrize(
    ("value", "names_code"),
    [
        ("a:b", True),
        ("plain", False),
        ("", False),
        ({"advantage": "a:b"}, True),
        ({"advantage": "grpo", "mask": {"kind": "a:b"}}, True),
        (["x", "a:b"], True),
        (["x", "y"], False),
    ],
)
def test_a_plug_counts_where_it_names_code(file: Path, value: Any, names_code: bool) -> None:
    os.chown(file, OTHER, -1)
    for key in PLUGS:
        section, _, name = key.partition(".")
        table = {section: {name: value}, "other": 3}
        if names_code:
            with pytest.raises(ConfigError, match=r"is not trusted: .* belongs to user 54321.*pass --trust") as raised:
                require_trust(file, table, {})
            assert f"{key} = {value!r}" in str(raised.value)
        else:
            assert require_trust(file, table, {}) is False
        assert require_trust(file, table, {key: "mine"}) is False


def test_a_power_counts_by_its_value(file: Path) -> None:
    for key in POWERS:
        section, _, name = key.partition(".")
        os.chown(file, OTHER, -1)
        with pytest.raises(ConfigError, match=f"{key} = 'x'"):
            require_trust(file, {section: {name: "x"}}, {})
        for table in ({section: {name: ""}}, {section: {}}, {section: None}, {}):
            assert require_trust(file, table, {}) is False
        os.chown(file, ME, -1)
        assert require_trust(file, {section: {name: "x"}}, {}) is True


def test_a_safe_environment_adds_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_MINE", "1")
    assert safe_environment() == {**os.environ, "PYTHONSAFEPATH": "1"}
