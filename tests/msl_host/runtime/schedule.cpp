// Fibers, barriers, and the meeting of a simdgroup's lanes.
#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

Fiber fibers[kMaxThreads];
Simdgroup simdgroups[kMaxThreads / kLanes];
Fiber* current;
Counters counters;
u32 last_place;
u32 group_index, group_epoch[3];

namespace {
constexpr size_t kStack = 64 * 1024;

u8* stacks;
void* main_stack_pointer;
u32 num_threads, num_simdgroups, num_exited, lane_shift;
u32 order[kMaxThreads / kLanes];
u64 seed_, random_state;
void (*entry_)(const u64*, const u32*);
const u64* arguments_;
}  // namespace

asm(R"(
.text
.globl msl_switch
.hidden msl_switch
.type msl_switch,@function
msl_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void msl_switch(void** save, void* load);

std::string place_text(u32 place) { return "@" + std::to_string(place >> 10) + ":" + std::to_string(place & 1023); }

std::string thread_text(const Fiber& fiber) {
  const u32 *t = fiber.attributes.thread_position_in_threadgroup, *g = fiber.attributes.threadgroup_position_in_grid;
  char text[160];
  snprintf(text, sizeof text, "thread (%u,%u,%u) of threadgroup (%u,%u,%u) [simdgroup %u, lane %u]", t[0], t[1], t[2],
           g[0], g[1], g[2], fiber.simdgroup, fiber.lane);
  return text;
}

u64 random_below(u64 bound) {
  random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
  return (random_state >> 33) % bound;
}

void leave_launch() {
  void* unused;
  msl_switch(&unused, main_stack_pointer);
  abort();
}

namespace {
// The lowest lane, counted from `lane_shift`.
u32 pick_lane(u32 lanes) {
  const u32 rotated = lane_shift ? lanes >> lane_shift | lanes << (kLanes - lane_shift) : lanes;
  return (__builtin_ctz(rotated) + lane_shift) % kLanes;
}

void switch_to(Fiber& fiber) {
  if (&fiber == current) return;
  Fiber* from = current;
  current = &fiber;
  counters.switches++;
  msl_switch(&from->stack_pointer, fiber.stack_pointer);
}

bool run_ready_lane(u32 simdgroup) {
  Simdgroup& s = simdgroups[simdgroup];
  if (!s.ready) return false;
  const u32 lane = pick_lane(s.ready);
  s.ready &= ~(1u << lane);
  switch_to(fibers[simdgroup * kLanes + lane]);
  return true;
}

void shuffle_order() {
  for (u32 i = num_simdgroups; i > 1; i--) std::swap(order[i - 1], order[random_below(i)]);
  lane_shift = u32(random_below(kLanes));
}

void report_blocked_simdgroup(u32 index) {
  const Simdgroup& s = simdgroups[index];
  char lanes[32];
  snprintf(lanes, sizeof lanes, "lanes %08x", s.arrived);
  std::string text = std::string(lanes) + " of simdgroup " + std::to_string(index) + " wait at " +
                     operation_name(s.operation) + place_text(s.place);
  if (s.at_barrier) {
    const Fiber& other = fibers[index * kLanes + __builtin_ctz(s.at_barrier)];
    snprintf(lanes, sizeof lanes, "lanes %08x", s.at_barrier);
    text += std::string(", but ") + lanes + " at threadgroup_barrier" + place_text(other.place);
  }
  report("divergent-simd-op", 0, text + "; seen by " + thread_text(fibers[index * kLanes + __builtin_ctz(s.arrived)]),
         true);
}

// All live threads wait at a threadgroup barrier: it must be one and the same, and no thread may have left.
void pass_threadgroup_barrier() {
  const Fiber *first = nullptr, *exited = nullptr;
  for (u32 i = 0; i < num_threads; i++) {
    if (fibers[i].exited) {
      exited = &fibers[i];
    } else if (!first) {
      first = &fibers[i];
    } else if (fibers[i].place != first->place) {
      report("divergent-barrier", 0,
             thread_text(*first) + " waits at threadgroup_barrier" + place_text(first->place) + ", but " +
                 thread_text(fibers[i]) + " at threadgroup_barrier" + place_text(fibers[i].place),
             true);
    }
  }
  if (exited)
    report("divergent-barrier", 0,
           "threadgroup_barrier" + place_text(first->place) + ": " + std::to_string(num_exited) + " of " +
               std::to_string(num_threads) + " threads ended without reaching it, such as " + thread_text(*exited),
           true);
  for (u32 flag : {kMemDevice, kMemThreadgroup})
    if (first->flags & flag) {
      group_epoch[flag]++;
      for (u32 i = 0; i < num_simdgroups; i++) simdgroups[i].epoch[flag] = 0;
    }
  counters.threadgroup_barriers++;
  for (u32 i = 0; i < num_simdgroups; i++) {
    simdgroups[i].ready = simdgroups[i].live;
    simdgroups[i].at_barrier = 0;
  }
  if (seed_) shuffle_order();
}

// Gives the CPU to a thread that can go on; comes back when this one can.
void run_others() {
  for (;;) {
    check_deadline();
    if (seed_ && random_below(8) == 0 && run_ready_lane(u32(random_below(num_simdgroups)))) return;
    if (run_ready_lane(current->simdgroup)) return;
    for (u32 i = 0; i < num_simdgroups; i++)
      if (run_ready_lane(order[i])) return;
    if (num_exited == num_threads) leave_launch();
    for (u32 i = 0; i < num_simdgroups; i++)
      if (simdgroups[i].arrived) report_blocked_simdgroup(i);
    pass_threadgroup_barrier();
  }
}

void complete(Simdgroup& s) {
  s.exchange[s.turn & 1].lanes = s.arrived;
  s.exchange[s.turn & 1].is_done = false;
  s.ready |= s.arrived;
  s.arrived = 0;
  s.turn++;
}

void fiber_main() {
  entry_(arguments_, reinterpret_cast<const u32*>(&current->attributes));
  Simdgroup& s = simdgroups[current->simdgroup];
  current->exited = true;
  num_exited++;
  s.live &= ~(1u << current->lane);
  if (s.arrived && s.arrived == s.live) complete(s);
  run_others();
  abort();
}

}  // namespace

// Every live lane of the simdgroup must come to this very operation. Returns what they brought.
Exchange& meet(u32 operation, u32 place) {
  Simdgroup& s = simdgroups[current->simdgroup];
  Exchange& exchange = s.exchange[s.turn & 1];
  const u32 bit = 1u << current->lane;
  last_place = place;
  if (!s.arrived) {
    s.operation = operation;
    s.place = place;
    counters.simd_operations++;
  } else if (s.operation != operation || s.place != place) {
    report("divergent-simd-op", 0,
           thread_text(*current) + " is at " + operation_name(operation) + place_text(place) +
               " while other lanes of its simdgroup wait at " + operation_name(s.operation) + place_text(s.place),
           true);
  }
  s.arrived |= bit;
  if (s.arrived == s.live) {
    complete(s);
    s.ready &= ~bit;
  } else {
    run_others();
  }
  return exchange;
}

Exchange& to_bring() {
  Simdgroup& s = simdgroups[current->simdgroup];
  return s.exchange[s.turn & 1];
}

void start_schedule(void (*entry)(const u64*, const u32*), const u64* arguments, u64 seed) {
  entry_ = entry;
  arguments_ = arguments;
  seed_ = seed;
  random_state = seed * 2654435761u + 12345;
  lane_shift = 0;
  counters = {};
  if (stacks) return;
  stacks = static_cast<u8*>(mmap(nullptr, kMaxThreads * kStack, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  for (u32 i = 0; i < kMaxThreads; i++) mprotect(stacks + i * kStack, 4096, PROT_NONE);
}

namespace {
void set_attributes(Attributes& a, u32 index, const u32 position[3], const u32 threads[3], const u32 launch[3],
                    const u32 groups[3], const u32 grid[3]) {
  const u32 at[3] = {index % threads[0], index / threads[0] % threads[1], index / (threads[0] * threads[1])};
  for (u32 i = 0; i < 3; i++) {
    a.thread_position_in_threadgroup[i] = at[i];
    a.threadgroup_position_in_grid[i] = position[i];
    a.thread_position_in_grid[i] = position[i] * launch[i] + at[i];
    a.threads_per_threadgroup[i] = threads[i];
    a.dispatch_threads_per_threadgroup[i] = launch[i];
    a.threadgroups_per_grid[i] = groups[i];
    a.threads_per_grid[i] = grid[i];
    a.grid_origin[i] = 0;
  }
  const u32 launched = launch[0] * launch[1] * launch[2];
  a.thread_index_in_threadgroup = index;
  a.thread_index_in_simdgroup = index % kLanes;
  a.simdgroup_index_in_threadgroup = index / kLanes;
  a.simdgroups_per_threadgroup = num_simdgroups;
  a.threads_per_simdgroup = kLanes;
  a.dispatch_simdgroups_per_threadgroup = (launched + kLanes - 1) / kLanes;
  a.thread_index_in_quadgroup = index % 4;
  a.quadgroup_index_in_threadgroup = index / 4;
  a.quadgroups_per_threadgroup = (num_threads + 3) / 4;
  a.dispatch_quadgroups_per_threadgroup = (launched + 3) / 4;
}
}  // namespace

void run_threadgroup(const u32 position[3], const u32 threads[3], const u32 launch[3], const u32 groups[3],
                     const u32 grid[3]) {
  num_threads = threads[0] * threads[1] * threads[2];
  num_simdgroups = (num_threads + kLanes - 1) / kLanes;
  num_exited = 0;
  memset(group_epoch, 0, sizeof group_epoch);
  counters.threadgroups++;
  counters.threads += num_threads;
  for (u32 i = 0; i < num_simdgroups; i++) {
    Simdgroup& s = simdgroups[i];
    const u32 lanes = std::min(kLanes, num_threads - i * kLanes);
    s.live = s.ready = lanes == kLanes ? ~0u : (1u << lanes) - 1;
    s.arrived = s.at_barrier = s.turn = 0;
    memset(s.epoch, 0, sizeof s.epoch);
    order[i] = i;
  }
  if (seed_) shuffle_order();
  for (u32 i = 0; i < num_threads; i++) {
    Fiber& fiber = fibers[i];
    fiber.thread = i;
    fiber.lane = i % kLanes;
    fiber.simdgroup = i / kLanes;
    fiber.exited = false;
    fiber.stack = reinterpret_cast<uintptr_t>(stacks) + i * kStack;
    set_attributes(fiber.attributes, i, position, threads, launch, groups, grid);
    u64* top = reinterpret_cast<u64*>(fiber.stack + kStack);
    *--top = 0;
    *--top = reinterpret_cast<u64>(fiber_main);
    for (int k = 0; k < 6; k++) *--top = 0;
    fiber.stack_pointer = top;
  }
  const u32 simdgroup = order[0], lane = pick_lane(simdgroups[simdgroup].ready);
  simdgroups[simdgroup].ready &= ~(1u << lane);
  current = &fibers[simdgroup * kLanes + lane];
  msl_switch(&main_stack_pointer, current->stack_pointer);
}

// ------------------------------------------------------------------ called by kernels
API void __msl_threadgroup_barrier(u32 flags, u32 place) {
  last_place = place;
  current->place = place;
  current->flags = flags;
  simdgroups[current->simdgroup].at_barrier |= 1u << current->lane;
  run_others();
}
