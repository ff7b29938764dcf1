"""What the compiler made of the tiles: accumulators in registers, and no instruction above a module's level.

The files are disassembled and never imported, so that levels above this machine's are tested as well.
"""

import functools
import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from typing import NamedTuple

import pytest

from fastattn import _dispatch

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64", reason="reads x86-64 machine code of ELF files"
    ),
    pytest.mark.skipif(shutil.which("objdump") is None, reason="objdump (binutils) is not installed"),
]

# Of tiles of two registers; those of one have twice as many.
TILE_ROWS = {"baseline": 6, "avx2": 6, "avx512": 8, "avx512_bf16": 8}
REGISTER = {"baseline": "%xmm", "avx2": "%ymm", "avx512": "%zmm", "avx512_bf16": "%zmm"}
LETTER = {"float": "f", "double": "d"}
levels = pytest.mark.parametrize("level", list(TILE_ROWS))


class Instruction(NamedTuple):
    address: int
    name: str
    operands: str


def objdump(level, *options):
    found = importlib.util.find_spec(f"fastattn._kernels.{level}")
    if found is None:
        pytest.skip(f"{level} is not built here")
    command = ["objdump", *options, found.origin]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@functools.cache
def functions_of(level):
    """{mangled name: its instructions} of a kernel module's file."""
    functions, body = {}, []
    for line in objdump(level, "-d", "--no-show-raw-insn").splitlines():
        if header := re.fullmatch(r"[0-9a-f]+ <(.+)>:", line):
            body = functions.setdefault(header[1], [])
        elif instruction := re.match(r"\s*([0-9a-f]+):\t(\S+) *([^#\n]*)", line):
            body.append(Instruction(int(instruction[1], 16), instruction[2], instruction[3].strip()))
    return functions


def tiles_of(level, pattern):
    """The bodies of all functions of the kernel's own whose mangled names continue like pattern."""
    if not _dispatch.kernel.vector_extension:
        pytest.skip("built without compiler vectors")
    functions = functions_of(level)
    if any(name.startswith(("__asan", "__ubsan", "__tsan")) for name in functions):
        pytest.skip("built with sanitizers")
    own = {name: body for name, body in functions.items() if name.startswith("_ZN12_GLOBAL__N_1")}
    if not own:
        pytest.skip(f"the {level} module's file has no local symbols: it is stripped")
    return [body for name, body in own.items() if re.match("_ZN12_GLOBAL__N_1" + pattern, name) and ".cold" not in name]


def innermost_loops(body):
    """From the target of each backward jump to the jump, unless another such loop lies within."""
    loops = []
    for instruction in body:
        target = re.match(r"[0-9a-f]+", instruction.operands) if instruction.name.startswith("j") else None
        if target and body[0].address <= int(target[0], 16) <= instruction.address:
            loops.append((int(target[0], 16), instruction.address))
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    return [[i for i in body if first <= i.address <= last] for first, last in inner]


def matching(pattern, instructions):
    return [i for i in instructions if re.fullmatch(pattern, i.name)]


def assert_in_registers(level, body, rows, vectors, multiply_add, add=None):
    """The function's main loop multiplies and adds into rows x vectors registers and keeps nothing in memory."""
    n_accumulators = rows * vectors
    loop = max(innermost_loops(body), key=lambda loop: len(matching(multiply_add, loop)))
    products = matching(multiply_add, loop)
    assert products
    assert len(products) % n_accumulators == 0  # once, or as often as the loop is unrolled
    assert all(REGISTER[level] in i.operands for i in products)
    sums = matching(add, loop) if add else products
    assert len(sums) == len(products)
    assert len({i.operands.rpartition("%")[2] for i in sums}) == n_accumulators

    framed = any(i.name == "mov" and i.operands == "%rsp,%rbp" for i in body)
    stack = ("(%rsp", "(%rbp") if framed else ("(%rsp",)
    spilled = [i for i in loop if any(base in i.operands for base in stack)]
    if vectors == 1:  # twice the rows: more addresses than general registers, so that some of them are reloaded
        spilled = [i for i in spilled if "mm" in i.operands]
    assert spilled == []
    assert [i for i in loop if i.name.startswith(("push", "call"))] == []
    stores = [i for i in loop if i.operands.endswith(")") and not i.name.startswith(("cmp", "test", "nop", "prefetch"))]
    assert [i for i in stores if "," in i.operands] == []


@levels
@pytest.mark.parametrize("vectors", [1, 2])
@pytest.mark.parametrize("real", list(LETTER))
@pytest.mark.parametrize("tile", ["score", "value"])
def test_accumulators_of_full_tiles_stay_in_registers(level, tile, real, vectors):
    rows = TILE_ROWS[level] * (2 // vectors)
    more = f"Lb[01]ENS_8FeaturesI{LETTER[real]}EE" if tile == "score" else ""
    bodies = tiles_of(level, f"10{tile}_rowsI{LETTER[real]}Li{rows}ELi{vectors}E{more}E")
    assert len(bodies) >= (2 if tile == "score" else 1)
    packed = "ps" if real == "float" else "pd"
    for body in bodies:
        if level == "baseline":
            assert_in_registers(level, body, rows, vectors, f"mul{packed}", f"add{packed}")
        else:
            assert_in_registers(level, body, rows, vectors, rf"vfmadd\d{{3}}{packed}")


@pytest.mark.parametrize("vectors", [1, 2])
def test_bfloat16_tiles_multiply_pairs(vectors):
    level, rows = "avx512_bf16", TILE_ROWS["avx512_bf16"] * (2 // vectors)
    bodies = tiles_of(level, f"10score_rowsIfLi{rows}ELi{vectors}ELb[01]ENS_5PairsEE")
    assert len(bodies) >= 2
    for body in bodies:
        assert_in_registers(level, body, rows, vectors, "vdpbf16ps")


def test_pairs_are_multiplied_in_their_own_level_only():
    assert [i for level in TILE_ROWS if level != "avx512_bf16" for i in matching("vdp.*", instructions_of(level))] == []


def instructions_of(level):
    return [instruction for body in functions_of(level).values() for instruction in body]


@pytest.mark.parametrize("module", ["cpu", "baseline"])
def test_modules_for_every_processor_have_no_avx_instruction(module):
    instructions = instructions_of(module)
    assert len(instructions) > 1000
    assert [i for i in instructions if re.search("%[yz]mm", i.operands) or i.name.startswith("v")] == []


def test_avx2_module_has_no_avx512_instruction():
    instructions = instructions_of("avx2")
    assert any("%ymm" in i.operands for i in instructions)
    assert [i for i in instructions if re.search(r"%zmm|%[xy]mm(1[6-9]|[23]\d)|%k[0-7]", i.operands)] == []


def test_avx512_module_uses_whole_registers():
    assert any("%zmm" in i.operands for i in instructions_of("avx512"))


@pytest.mark.parametrize("module", ["cpu", *TILE_ROWS])
def test_modules_keep_their_code_to_themselves(module):
    # A function that two levels export would be one function in the process: the first one loaded, for both.
    exported = re.findall(r"^[0-9a-f]+ .*\.text\s.* (\S+)$", objdump(module, "-T"), re.MULTILINE)
    assert exported == [f"PyInit_{module}"]
