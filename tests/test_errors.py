"""The exception tree."""

from __future__ import annotations

import inspect

from draftline import errors


def test_a_users_fault_exits_with_2_and_a_faulty_run_with_1() -> None:
    tree = {
        name: kind
        for name, kind in vars(errors).items()
        if inspect.isclass(kind) and issubclass(kind, Exception)
    }
    users = {name for name, kind in tree.items() if kind.exit_code == 2}
    assert users == {
        "UserError",
        "ConfigError",
        "DataError",
        "DeviceError",
        "TargetError",
        "ResumeError",
    }
    assert all(issubclass(kind, errors.DraftlineError) for kind in tree.values())
    assert {kind.exit_code for kind in tree.values()} == {1, 2}
    assert all(issubclass(tree[name], errors.UserError) for name in users)
