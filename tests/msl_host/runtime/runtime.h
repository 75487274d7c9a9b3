// Runs one launch of a kernel on the CPU: one fiber for each GPU thread, exact barriers and simdgroup operations, and
// every access to memory checked. The kernel is compiled with clang's ThreadSanitizer pass; memory.cpp supplies the
// hooks which that pass calls. One launch at a time, on one operating-system thread.
#pragma once
#include <cstdint>
#include <string>
#include <vector>
#define API extern "C" __attribute__((visibility("default")))

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

constexpr u32 kLanes = 32;
constexpr u32 kMaxThreads = 1024;
constexpr u32 kMemDevice = 1, kMemThreadgroup = 2;

// Order of the values that the generated trampoline picks a kernel's attributes from; see signature.py.
struct Attributes {
  u32 thread_position_in_threadgroup[3], threadgroup_position_in_grid[3], thread_position_in_grid[3];
  u32 threads_per_threadgroup[3], dispatch_threads_per_threadgroup[3], threadgroups_per_grid[3], threads_per_grid[3];
  u32 thread_index_in_threadgroup, thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
  u32 simdgroups_per_threadgroup, threads_per_simdgroup, dispatch_simdgroups_per_threadgroup;
  u32 thread_index_in_quadgroup, quadgroup_index_in_threadgroup, quadgroups_per_threadgroup;
  u32 dispatch_quadgroups_per_threadgroup, grid_origin[3];
};

struct Fiber {
  void* stack_pointer;
  uintptr_t stack;  // lowest address
  u32 thread, lane, simdgroup;
  u32 place, flags;  // of the threadgroup barrier it waits at
  bool exited;
  Attributes attributes;
};

// What the lanes of a simdgroup exchange at one operation. Two in turn: a slow lane still reads the last one.
struct Exchange {
  u32 lanes;  // that took part
  u32 value[kLanes], other[kLanes];
  float left[kLanes][2], right[kLanes][2], sum[kLanes][2], product[64];
  bool is_done;  // the result is computed once for all lanes
};
struct Simdgroup {
  u32 live, ready, arrived, at_barrier;  // masks of lanes
  u32 operation, place;                  // that `arrived` wait at
  u32 turn, epoch[3];                    // epoch by memory flag: simdgroup barriers since the last threadgroup barrier
  Exchange exchange[2];
};

struct Counters {
  u64 threadgroups, threads, threadgroup_barriers, simdgroup_barriers, simd_operations, matrix_multiplies, atomics;
  u64 threadgroup_bytes_read, threadgroup_bytes_written, switches;
};

// ------------------------------------------------------------------ schedule.cpp
extern Fiber fibers[kMaxThreads];
extern Simdgroup simdgroups[kMaxThreads / kLanes];
extern Fiber* current;
extern Counters counters;
extern u32 last_place;      // of a barrier or simd operation in this launch
extern u32 group_index;     // number of the running threadgroup, from 1
extern u32 group_epoch[3];  // threadgroup barriers passed, by memory flag
std::string place_text(u32 place);
std::string thread_text(const Fiber& fiber);
void run_threadgroup(const u32 position[3], const u32 threads[3], const u32 launch[3], const u32 groups[3],
                     const u32 grid[3]);
void start_schedule(void (*entry)(const u64*, const u32*), const u64* arguments, u64 seed);
u64 random_below(u64 bound);
[[noreturn]] void leave_launch();
void check_deadline();

Exchange& to_bring();  // where a lane puts what it brings to the next operation
Exchange& meet(u32 operation, u32 place);

// ---------------------------------------------------------------------- simd.cpp
// Numbers of operations: reductions from 0, shuffles from 32.
enum { kReduce = 0, kShuffle = 32, kBallot = 64, kMatrix = 65, kMultiply = 67, kSimdgroupBarrier = 68 };
std::string operation_name(u32 operation);

// -------------------------------------------------------------------- memory.cpp
void start_memory(uintptr_t group_low, uintptr_t group_high, uintptr_t module_low, uintptr_t module_high, u32 granule,
                  bool count_lines, const u64* variables, u64 num_variables);
void start_group_memory();
void end_group_memory();
void mark_atomic(uintptr_t address, bool reads, bool writes, uintptr_t pc);
extern uintptr_t last_access_pc;
bool is_kernel_code(uintptr_t pc);

// -------------------------------------------------------------------- launch.cpp
// Notes an error; a fatal one ends the launch. `pc` is an address in the kernel, or 0 where the text has the place.
void report(const char* kind, uintptr_t pc, const std::string& text, bool fatal);
extern bool is_over;
extern const u64* launch_arguments;
extern u32 launch_num_arguments;
