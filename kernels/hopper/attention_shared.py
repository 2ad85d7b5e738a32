"""What the partitions of an attention program share: its memory, its barriers, and the work list."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate


@aggregate
class Shared:
    """A program's shared memory: Q, the ring of K and V blocks, and the barriers of both."""

    q_main: gl.shared_memory_descriptor  # [WARPGROUPS, 64, MAIN]
    q_tail: gl.shared_memory_descriptor  # [WARPGROUPS, 64, TAIL]
    k_main: gl.shared_memory_descriptor  # [STAGES, KEYS, MAIN]
    k_tail: gl.shared_memory_descriptor
    v_main: gl.shared_memory_descriptor
    v_tail: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # [STAGES, 1]
    empty: gl.shared_memory_descriptor
    turn: gl.shared_memory_descriptor  # [WARPGROUPS, 1]

    @gluon.constexpr_function
    def __init__(self, q_main, q_tail, k_main, k_tail, v_main, v_tail, q_full, q_empty, full, empty, turn):
        self.q_main = q_main
        self.q_tail = q_tail
        self.k_main = k_main
        self.k_tail = k_tail
        self.v_main = v_main
        self.v_tail = v_tail
        self.q_full = q_full
        self.q_empty = q_empty
        self.full = full
        self.empty = empty
        self.turn = turn


@gluon.jit
def load_item(work_list_ptr, item):
    """First and end query row, first and end row of the sequence, head.

    Volatile, so that loading it again costs a load and not the registers to keep it.
    """
    item_ptr = work_list_ptr + 5 * (1 + item)
    row = gl.load(item_ptr, volatile=True)
    row_end = gl.load(item_ptr + 1, volatile=True)
    first = gl.load(item_ptr + 2, volatile=True)
    end = gl.load(item_ptr + 3, volatile=True)
    head = gl.load(item_ptr + 4, volatile=True)
    return row, row_end, first, end, head
