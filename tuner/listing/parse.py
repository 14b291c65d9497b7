"""From Triton's text of gfx machine code to instructions, labels, the kernel descriptor and the argument layout."""

import re
from dataclasses import dataclass, field
from typing import NamedTuple


class ListingError(Exception):
    """A listing asks for something that the machine would not do, or that is not modelled."""


class UnknownInstruction(ListingError):
    """An opcode, operand or modifier without a model; the text names it."""


@dataclass(frozen=True)
class Instruction:
    """One line: `v_add_f32_e64 v1, |v2|, s3 clamp` is op, three operands as text and {"clamp": True}."""

    op: str
    operands: tuple[str, ...]
    modifiers: dict[str, str | bool] = field(default_factory=dict)
    number: int = 0  # of the line in the listing, from 1
    text: str = ""


class Argument(NamedTuple):
    """Where one kernel argument lies: bytes from the start of the argument segment, bytes, and is it a pointer?"""

    offset: int
    size: int
    pointer: bool


@dataclass(frozen=True)
class Listing:
    """One kernel. labels: instruction index by name; descriptor: the .amdhsa_ values; arguments in order."""

    name: str
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    descriptor: dict[str, int]
    arguments: tuple[Argument, ...]


_INNER = re.compile(r",\s+(?=[^\[(]*[\])])")  # commas inside of brackets
_SPLIT = re.compile(r",\s*(?![^\[(]*[\])])")  # and outside
_LABEL = re.compile(r"([.\w$]+):\s*(?:;.*)?$")
_DESCRIPTOR = re.compile(r"\.amdhsa_(\w+)\s+(\d+)\s*$")
_ARGUMENT = re.compile(r"\s+(-?)\s*\.(\w+):\s*(\S+)")


def parse_instruction(line: str, number: int = 0) -> Instruction:
    """The instruction of one line without label; comments are dropped."""
    text = line.split(";")[0].strip()
    op, _, rest = text.partition(" ") if "\t" not in text else text.partition("\t")
    operands, modifiers = [], {}
    for part in _SPLIT.split(_INNER.sub(",", rest.strip())) if rest.strip() else ():
        operand, *tail = part.split()
        operands.append(operand)
        for word in tail:
            name, colon, value = word.partition(":")
            modifiers[name] = value if colon else True
    return Instruction(op, tuple(operands), modifiers, number, text)


def parse(text: str) -> Listing:
    """The kernel of a listing; raises ListingError where there is none or more than one."""
    names = re.findall(r"^\s*\.amdhsa_kernel\s+(\S+)", text, re.M)
    if len(names) != 1:
        raise ListingError(f"a listing of one kernel has one .amdhsa_kernel, this one {len(names)}")
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if match := _LABEL.match(line):
            inside = (inside or match[1] == names[0]) and not match[1].startswith(".Lfunc_end")
            labels[match[1]] = len(instructions)
        elif inside and line[:1].isspace() and line.strip()[:1].isalpha():
            instructions.append(parse_instruction(line, number))
    descriptor = {m[1]: int(m[2]) for line in text.splitlines() if (m := _DESCRIPTOR.match(line.strip()))}
    return Listing(names[0], tuple(instructions), labels, descriptor, _arguments(text))


def _arguments(text: str) -> tuple[Argument, ...]:
    """The .args list of the metadata note, without the hidden ones that the runtime would fill."""
    items: list[dict[str, str]] = []
    lines = iter(text[text.find(".amdgpu_metadata") :].splitlines())
    for line in lines:
        if line.strip() == ".args:":
            break
    for line in lines:
        match = _ARGUMENT.match(line)
        if not match or not line.startswith("      "):  # less deep: the next field of the kernel
            break
        if match[1]:
            items.append({})
        items[-1][match[2]] = match[3]
    return tuple(
        Argument(int(item["offset"]), int(item["size"]), item["value_kind"] == "global_buffer")
        for item in items
        if not item["value_kind"].startswith("hidden_")
    )
