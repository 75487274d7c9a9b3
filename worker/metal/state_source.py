"""How a kernel over a pool of states begins: which sequence, head and rows are its own, and the state in registers.

A state is `[heads, rows, width]` float32. Both want the constants ROWS and PARTS (and GROUPS, LPR, NSG of a chunk) in
scope, and leave where a sequence is to be skipped. `gated_delta` and `mamba2` go on from there.
"""

_STEP = r"""  const int sequence = threadgroup_position_in_grid.z;
  const int head = threadgroup_position_in_grid.y;
  const int lane = thread_index_in_simdgroup;
  const int top = (threadgroup_position_in_grid.x * NSG + simdgroup_index_in_threadgroup) * ROWS;
  const int64_t row = sequences[sequence * 4];
  const int64_t slot = sequences[sequence * 4 + 2];
  const bool fresh = sequences[sequence * 4 + 3] != 0;
  const int64_t y_at = (row * @HEADS + head) * @ROWS + top;
  if (sequence == 0 && head == 0 && top == 0 && lane == 0) {
    token[0] = 0;
  }
  if (slot < 0) {
    if (lane < ROWS) {
      y[y_at + lane] = T(0.0f);
    }
    return;
  }
  device Vec* states = (device Vec*)pool + ((slot * @HEADS + head) * @ROWS + top) * (@WIDTH / VEC) + lane;

  Vec state[ROWS][PARTS];
  for (int r = 0; r < ROWS; r++) {
    for (int n = 0; n < PARTS; n++) {
      state[r][n] = fresh ? Vec(0.0f) : states[r * (@WIDTH / VEC) + n * 32];
    }
  }
"""

# Lane `part` of a state row holds groups of four elements, every LPR-th group: no two lanes meet in a bank.
_CHUNK = r"""  const int sequence = threadgroup_position_in_grid.z;
  const int head = threadgroup_position_in_grid.y;
  const int lane = thread_index_in_simdgroup;
  const int part = lane % LPR;
  const int in_tile = simdgroup_index_in_threadgroup * ROWS + lane / LPR;
  const int top = threadgroup_position_in_grid.x * NSG * ROWS;
  const int64_t first = sequences[sequence * 4];
  const int num_rows = sequences[sequence * 4 + 1];
  const int64_t slot = sequences[sequence * 4 + 2];
  const bool fresh = sequences[sequence * 4 + 3] != 0;
  if (sequence == 0 && head == 0 && top == 0 && thread_index_in_threadgroup == 0) {
    token[0] = 0;
  }
  if (slot < 0) {
    for (int t = 0; t < num_rows; t++) {
      if (part == 0) {
        y[((first + t) * @HEADS + head) * @ROWS + top + in_tile] = T(0.0f);
      }
    }
    return;
  }
  if (num_rows == 0) {
    return;
  }
  device float4* states = (device float4*)pool + ((slot * @HEADS + head) * @ROWS + top + in_tile) * GROUPS + part;

  float4 state[PARTS];
  for (int n = 0; n < PARTS; n++) {
    state[n] = fresh ? float4(0.0f) : states[n * LPR];
  }
"""


def step_prologue(heads: str, rows: str, width: str) -> str:
    """For one row of each sequence: a simdgroup holds ROWS rows of a state. The names are template constants."""
    return _named(_STEP, heads, rows, width)


def chunk_prologue(heads: str, rows: str, width: str) -> str:
    """For any number of rows of each sequence: LPR lanes share a row of a state."""
    return _named(_CHUNK, heads, rows, width)


def _named(source: str, heads: str, rows: str, width: str) -> str:
    return source.replace("@HEADS", heads).replace("@ROWS", rows).replace("@WIDTH", width)
