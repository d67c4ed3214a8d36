"""Generated pages follow the code, and miss nothing of it."""

from __future__ import annotations

import pytest

from orca_dist import errors
from orca_dist.proto.v1 import generate_pb2 as pb
from scripts import docs_api, docs_errors


def test_the_page_of_calls_is_up_to_date() -> None:
    assert docs_api.main(["--check"]) == 0


def test_the_page_of_errors_is_up_to_date() -> None:
    assert docs_errors.main(["--check"]) == 0


def test_every_call_and_field_of_the_proto_is_on_the_page() -> None:
    page = docs_api.page()
    service = pb.DESCRIPTOR.services_by_name["GenerateService"]
    rows = {line.split("|")[1].strip(" `") for line in page.splitlines() if line.startswith("| `")}
    names = {method.name for method in service.methods}
    for message in pb.DESCRIPTOR.message_types_by_name.values():
        assert f"## {message.name}\n" in page
        names |= {field.name for field in message.fields}
    for enum in pb.DESCRIPTOR.enum_types_by_name.values():
        names |= {value.name for value in enum.values}
    assert rows == names


def test_a_line_that_is_not_understood_is_an_error() -> None:
    with pytest.raises(ValueError, match="can't read: oneof kind"):
        docs_api.blocks("message A {\n  oneof kind {\n  }\n}\n")


def test_comments_belong_to_what_they_stand_above_or_behind() -> None:
    head, (block,) = docs_api.blocks(
        '// Head.\nsyntax = "proto3";\n\n// Not this.\n\n// One\n// two.\nmessage A {\n'
        "  // Above.\n  optional int64 b = 1;\n  repeated C d = 2;  // behind\n}\n"
    )
    assert (head, block.kind, block.name, block.comment) == ("Head.", "message", "A", "One two.")
    assert block.rows == [
        ("`b`", "optional int64", "1", "Above."),
        ("`d`", "repeated C", "2", "behind"),
    ]


def test_every_error_is_on_the_page_with_a_fix_of_its_own() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    page = docs_errors.page()
    for kind in kinds:
        assert f"| `{kind.__name__}` |" in page
        assert "fix" in vars(kind)
    assert len({kind.code for kind in kinds}) == len(kinds)
