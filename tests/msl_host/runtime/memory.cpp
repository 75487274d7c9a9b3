// Buffers, threadgroup memory, and the check of every access: bounds, initialisation, write permission, order.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <unordered_map>
#include <unordered_set>

#include "order.h"
#include "runtime.h"

namespace {
constexpr uintptr_t kPage = 64 * 1024;
// Buffers lie in one reservation with unmapped gaps, so that a wild index meets no other data.
constexpr size_t kReservation = size_t(1) << 38;

struct Cell {
  Access write;
  Accesses reads;
};

template <class T>
T* map_zeros(size_t count) {
  void* p = mmap(nullptr, count * sizeof(T) + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                 -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<T*>(p);
}
template <class T>
void unmap(T*& p, size_t count) {
  if (p) munmap(p, count * sizeof(T) + 4096);
  p = nullptr;
}

struct LoadCounts {
  u64 requests, lines, least_lines;
};
struct Buffer {
  std::string name;
  uintptr_t address;
  size_t size, span;
  bool is_writable, checks_init;
  u32 granule;  // bytes of a cell
  size_t row_bytes;
  u64 bytes_read, bytes_written, unique_read, unique_written;
  u8 *seen, *written;  // per byte
  Cell* cells;         // per granule, for what may be written
  Accesses* atomics;   // per granule, once there is an atomic operation
  std::unordered_set<u64> written_rows;
  LoadCounts loads;
  size_t num_cells() const { return size / granule + 1; }
};

std::vector<Buffer> buffers;
uintptr_t reservation, next_address;
u16* buffer_of_page;  // number + 1

uintptr_t group_address, module_low_, module_high_;
size_t group_size;
u32 group_granule;
std::vector<Cell> group_cells;
std::vector<Accesses> group_atomics;
std::vector<u32> group_written;  // threadgroup that last wrote the granule
std::vector<u8> group_is_variable;  // per byte: not in a gap between variables
bool group_has_atomics;

bool count_lines_;
struct LoadKey {
  uintptr_t pc;
  u32 simdgroup, turn;
  bool operator==(const LoadKey& o) const { return pc == o.pc && simdgroup == o.simdgroup && turn == o.turn; }
};
struct LoadHash {
  size_t operator()(const LoadKey& k) const {
    return k.pc * 0x9e3779b97f4a7c15ull + k.simdgroup * 0xff51afd7ed558ccdull + k.turn * 0xc4ceb9fe1a85ec53ull;
  }
};
struct Load {
  u32 buffer;
  std::vector<std::pair<uintptr_t, u32>> parts;
};
// The n-th execution of one load instruction by the lanes of a simdgroup is one request.
std::unordered_map<LoadKey, Load, LoadHash> group_loads;
std::unordered_map<u64, u32> load_turns;

std::string group_variable_text(uintptr_t address) {
  return "@T" + std::to_string(address - group_address) + "@";  // launch.py puts the variable's name there
}

struct Place {
  const Buffer* buffer;  // none for threadgroup memory
  uintptr_t address;
  uintptr_t pc;
  std::string text() const {
    if (!buffer) return group_variable_text(address);
    return "byte " + std::to_string(address - buffer->address) + " of buffer '" + buffer->name + "'";
  }
};

__attribute__((noinline)) void report_race(const Cell& cell, const Accesses* atomics, bool is_write, const Now& now,
                                           const Place& place) {
  std::string other, did;
  if (!happens_before(cell.write, now)) {
    other = access_text(cell.write);
    did = "wrote";
  } else if (is_write && !all_happen_before(cell.reads, now)) {
    other = culprit_text(cell.reads, now);
    did = "read";
  } else {
    other = culprit_text(*atomics, now);
    did = "updated atomically";
  }
  report(now.is_device ? "race-device" : "race-threadgroup", place.pc,
         thread_text(*current) + (is_write ? " writes " : " reads ") + place.text() + ", which " + other + " " + did +
             " with no barrier for this memory in between",
         false);
}

inline void check_order(Cell& cell, Accesses* atomics, bool is_write, bool is_atomic, const Now& now,
                        const Place& place) {
  if (!happens_before(cell.write, now) || (is_write && !all_happen_before(cell.reads, now)) ||
      (atomics && !is_atomic && !all_happen_before(*atomics, now)))
    report_race(cell, atomics, is_write, now, place);
  if (is_atomic && atomics)
    remember(*atomics, now.access);
  else if (is_write)
    cell.write = now.access;
  else
    remember(cell.reads, now.access);
}

void count_load(uintptr_t address, u32 size, uintptr_t pc, u32 buffer) {
  const u32 turn = load_turns[pc * kMaxThreads + current->thread]++;
  Load& load = group_loads[{pc, current->simdgroup, turn}];
  load.buffer = buffer;
  load.parts.push_back({address, size});
}

void mark_bytes(u8* map, u64& unique, size_t at, u32 size) {
  for (u32 i = 0; i < size; i++)
    if (!map[at + i]) {
      map[at + i] = 1;
      unique++;
    }
}

void report_granule(uintptr_t pc) { report("granule", pc, "", true); }

void access_buffer(Buffer& b, uintptr_t address, u32 size, bool is_write, bool is_atomic, uintptr_t pc) {
  const size_t at = address - b.address;
  if (is_write) {
    b.bytes_written += size;
    if (!b.is_writable)
      report("write-to-input", pc,
             thread_text(*current) + " writes byte " + std::to_string(at) + " of input '" + b.name +
                 "', which is not declared as written in place",
             true);
    if (b.row_bytes) b.written_rows.insert(at / b.row_bytes);
  } else {
    b.bytes_read += size;
    if (count_lines_) count_load(address, size, pc, u32(&b - buffers.data()));
    mark_bytes(b.seen, b.unique_read, at, size);
  }
  if (b.written) {
    if (is_write) {
      mark_bytes(b.written, b.unique_written, at, size);
    } else if (b.checks_init) {
      for (u32 i = 0; i < size; i++)
        if (!b.written[at + i]) {
          report("uninitialised-read", pc,
                 thread_text(*current) + " reads byte " + std::to_string(at + i) + " of buffer '" + b.name +
                     "', which holds nothing",
                 false);
          break;
        }
    }
  }
  if (!b.cells) return;
  if (at % b.granule || size % b.granule) report_granule(pc);
  const Now now = now_in(true);
  for (size_t i = at / b.granule; i * b.granule < at + size; i++)
    check_order(b.cells[i], b.atomics ? &b.atomics[i] : nullptr, is_write, is_atomic, now,
                {&b, b.address + i * b.granule, pc});
}

void access_group(uintptr_t address, u32 size, bool is_write, bool is_atomic, uintptr_t pc) {
  const size_t at = address - group_address;
  if (at + size > group_size || !group_is_variable[at] || !group_is_variable[at + size - 1])
    report("out-of-bounds", pc,
           thread_text(*current) + (is_write ? " writes " : " reads ") + std::to_string(size) + " bytes at " +
               group_variable_text(address),
           true);
  (is_write ? counters.threadgroup_bytes_written : counters.threadgroup_bytes_read) += size;
  if (at % group_granule || size % group_granule) report_granule(pc);
  const Now now = now_in(false);
  bool is_reported = false;
  for (size_t i = at / group_granule; i * group_granule < at + size; i++) {
    const uintptr_t place = group_address + i * group_granule;
    if (is_write) {
      group_written[i] = group_index;
    } else if (group_written[i] != group_index && !is_reported) {
      is_reported = true;
      report("uninitialised-read", pc,
             thread_text(*current) + " reads " + group_variable_text(place) + ", which no thread of its group has written",
             false);
    }
    check_order(group_cells[i], group_has_atomics ? &group_atomics[i] : nullptr, is_write, is_atomic, now,
                {nullptr, place, pc});
  }
}

const Buffer* nearest(uintptr_t address) {
  const Buffer* best = nullptr;
  uintptr_t least = ~uintptr_t(0);
  for (const Buffer& b : buffers) {
    const uintptr_t distance = address < b.address ? b.address - address : address - b.address;
    if (distance < least) best = &b, least = distance;
  }
  return best;
}

void report_outside(uintptr_t address, u32 size, bool is_write, uintptr_t pc, const Buffer* b) {
  if (!b) b = nearest(address);
  std::string text = thread_text(*current) + (is_write ? " writes " : " reads ") + std::to_string(size) + " bytes";
  if (b)
    text += " at byte " + std::to_string(int64_t(address - b->address)) + " of buffer '" + b->name + "', which has " +
            std::to_string(b->size);
  report("out-of-bounds", pc, text, true);
}

void access(uintptr_t address, u32 size, bool is_write, uintptr_t pc, bool is_atomic = false) {
  check_deadline();
  last_access_pc = pc;
  const uintptr_t offset = address - reservation;
  if (offset < kReservation) {
    const u16 number = buffer_of_page[offset / kPage];
    Buffer* b = number ? &buffers[number - 1] : nullptr;
    if (!b || address < b->address || address + size > b->address + b->size)
      report_outside(address, size, is_write, pc, b);
    return access_buffer(*b, address, size, is_write, is_atomic, pc);
  }
  if (address - group_address < group_size) return access_group(address, size, is_write, is_atomic, pc);
  if (address - current->stack < 64 * 1024) return;
  if (!is_write && is_kernel_code(address)) return;  // a constant
  // The launch's own arguments, which the generated entry reads.
  const uintptr_t arguments = reinterpret_cast<uintptr_t>(launch_arguments);
  if (!is_write && (address - arguments < launch_num_arguments * sizeof(u64) ||
                    address - reinterpret_cast<uintptr_t>(fibers) < sizeof fibers))
    return;
  char text[96];
  snprintf(text, sizeof text, " %s %u bytes at the wild address 0x%lx", is_write ? "writes" : "reads", size,
           static_cast<unsigned long>(address));
  report("out-of-bounds", pc, thread_text(*current) + text, true);
}

void free_buffers() {
  for (Buffer& b : buffers) {
    const uintptr_t base = b.address & ~(kPage - 1);
    mmap(reinterpret_cast<void*>(base), b.span, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    memset(&buffer_of_page[(base - reservation) / kPage], 0, b.span / kPage * sizeof(u16));
    unmap(b.seen, b.size);
    unmap(b.written, b.size);
    unmap(b.cells, b.num_cells());
    unmap(b.atomics, b.num_cells());
  }
  buffers.clear();
}
}  // namespace

uintptr_t last_access_pc;

bool is_kernel_code(uintptr_t pc) { return pc - module_low_ < module_high_ - module_low_; }

void mark_atomic(uintptr_t address, bool reads, bool writes, uintptr_t pc) {
  const uintptr_t offset = address - reservation;
  if (offset < kReservation) {
    const u16 number = buffer_of_page[offset / kPage];
    if (number && buffers[number - 1].cells && !buffers[number - 1].atomics)
      buffers[number - 1].atomics = map_zeros<Accesses>(buffers[number - 1].num_cells());
  } else if (address - group_address < group_size && !group_has_atomics) {
    group_has_atomics = true;
    group_atomics.assign(group_cells.size(), Accesses{});
  }
  if (reads) access(address, 4, false, pc, true);
  if (writes) access(address, 4, true, pc, true);
}

void start_memory(uintptr_t group_low, uintptr_t group_high, uintptr_t module_low, uintptr_t module_high, u32 granule,
                  bool count_lines, const u64* variables, u64 num_variables) {
  group_address = group_low;
  group_size = group_high - group_low;
  module_low_ = module_low;
  module_high_ = module_high;
  group_granule = granule;
  count_lines_ = count_lines;
  group_has_atomics = false;
  group_cells.assign(group_size / granule + 1, Cell{});
  group_written.assign(group_size / granule + 1, 0);
  group_is_variable.assign(group_size, false);
  for (u64 i = 0; i < num_variables; i++)
    std::fill_n(group_is_variable.begin() + variables[2 * i], variables[2 * i + 1], true);
}

void start_group_memory() { memset(reinterpret_cast<void*>(group_address), 0xff, group_size); }

void end_group_memory() {
  for (auto& [key, load] : group_loads) {
    std::vector<uintptr_t> lines, bytes;
    for (const auto& [address, size] : load.parts)
      for (uintptr_t a = address; a < address + size; a++) {
        bytes.push_back(a);
        lines.push_back(a / 64);
      }
    for (auto* v : {&lines, &bytes}) {
      std::sort(v->begin(), v->end());
      v->erase(std::unique(v->begin(), v->end()), v->end());
    }
    LoadCounts& counts = buffers[load.buffer].loads;
    counts.requests++;
    counts.lines += lines.size();
    counts.least_lines += (bytes.size() + 63) / 64;
  }
  group_loads.clear();
  load_turns.clear();
}

// ------------------------------------------------------------------ called by launch.py
API int msl_reset_buffers() {
  if (!reservation) {
    void* p = mmap(nullptr, kReservation + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) return -1;
    reservation = (reinterpret_cast<uintptr_t>(p) + kPage - 1) & ~(kPage - 1);
    buffer_of_page = map_zeros<u16>(kReservation / kPage);
  }
  free_buffers();
  next_address = reservation + kPage;
  return 0;
}

// `is_filled`: all bytes count as initialised. `row_bytes` > 0 has written rows noted. Returns the address, 0 if there
// is no room.
API void* msl_add_buffer(const char* name, u64 size, int is_writable, int is_filled, u32 granule, u64 row_bytes) {
  const size_t span = std::max<size_t>(kPage, (size + kPage - 1) & ~(kPage - 1));
  if (next_address + span + 2 * kPage > reservation + kReservation) return nullptr;
  void* at = mmap(reinterpret_cast<void*>(next_address), span, PROT_READ | PROT_WRITE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  Buffer b{};
  b.name = name;
  b.address = next_address;
  b.size = size;
  b.span = span;
  b.is_writable = is_writable;
  b.checks_init = !is_filled;
  b.granule = granule;
  b.row_bytes = row_bytes;
  b.seen = map_zeros<u8>(size);
  if (!is_filled || is_writable) b.written = map_zeros<u8>(size);
  if (is_writable) b.cells = map_zeros<Cell>(b.num_cells());
  buffers.push_back(b);
  std::fill_n(&buffer_of_page[(next_address - reservation) / kPage], span / kPage, u16(buffers.size()));
  next_address += span + kPage;
  return at;
}

// Bytes [at, at + size) hold something from the start.
API void msl_mark_filled(u32 buffer, u64 at, u64 size) { memset(buffers[buffer].written + at, 1, size); }

API void msl_buffer_counters(u32 buffer, u64 out[7]) {
  const Buffer& b = buffers[buffer];
  const u64 values[] = {b.bytes_read, b.bytes_written, b.unique_read, b.unique_written,
                        b.loads.requests, b.loads.lines, b.loads.least_lines};
  memcpy(out, values, sizeof values);
}

API u64 msl_first_unwritten(u32 buffer) {
  const Buffer& b = buffers[buffer];
  return u64(std::find(b.written, b.written + b.size, 0) - b.written);
}

API u64 msl_written_rows(u32 buffer, u64* out, u64 room) {
  u64 count = 0;
  for (u64 row : buffers[buffer].written_rows)
    if (count < room) out[count++] = row;
  return buffers[buffer].written_rows.size();
}

// ------------------------------------------------------- called by the ThreadSanitizer pass
#define PC (reinterpret_cast<uintptr_t>(__builtin_return_address(0)) - 1)
#define AT(p) reinterpret_cast<uintptr_t>(p)
#define HOOKS(n)                                                           \
  API void __tsan_read##n(void* p) { access(AT(p), n, false, PC); }        \
  API void __tsan_write##n(void* p) { access(AT(p), n, true, PC); }        \
  API void __tsan_unaligned_read##n(void* p) { access(AT(p), n, false, PC); } \
  API void __tsan_unaligned_write##n(void* p) { access(AT(p), n, true, PC); } \
  API void __tsan_read_write##n(void* p) {                                 \
    access(AT(p), n, false, PC);                                           \
    access(AT(p), n, true, PC);                                            \
  }                                                                        \
  API void __tsan_unaligned_read_write##n(void* p) {                       \
    access(AT(p), n, false, PC);                                           \
    access(AT(p), n, true, PC);                                            \
  }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
API void __tsan_init() {}
API void* __tsan_memcpy(void* to, const void* from, size_t size) {
  access(AT(from), u32(size), false, PC);
  access(AT(to), u32(size), true, PC);
  return memmove(to, from, size);
}
API void* __tsan_memmove(void* to, const void* from, size_t size) {
  access(AT(from), u32(size), false, PC);
  access(AT(to), u32(size), true, PC);
  return memmove(to, from, size);
}
API void* __tsan_memset(void* to, int value, size_t size) {
  access(AT(to), u32(size), true, PC);
  return memset(to, value, size);
}
