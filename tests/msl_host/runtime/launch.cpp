// One launch: threadgroups in order, errors, signals, undefined behaviour, half precision.
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime.h"

bool is_over;
const u64* launch_arguments;
u32 launch_num_arguments;

namespace {
constexpr int kMaxErrors = 20;
constexpr int kTimerSignal = 45;
std::string errors;
int num_errors;
std::vector<std::pair<uintptr_t, const char*>> reported;
uintptr_t module_low_;
volatile sig_atomic_t is_expired;
timer_t timer;
thread_local bool is_running;
struct sigaction old_actions[65];
}  // namespace

void report(const char* kind, uintptr_t pc, const std::string& text, bool fatal) {
  const std::pair<uintptr_t, const char*> key{pc, kind};
  const bool is_new = !pc || std::find(reported.begin(), reported.end(), key) == reported.end();
  if (is_new && num_errors < kMaxErrors) {
    reported.push_back(key);
    errors += std::string(kind) + "\t" + std::to_string(pc ? pc - module_low_ : 0) + "\t" + text + "\n";
    num_errors++;
  }
  if (!fatal) return;
  is_over = true;
  leave_launch();
}

static std::string overtime_text() {
  std::string text = thread_text(*current) + " still runs when the launch's CPU time is spent";
  if (last_access_pc) text += "; last access to memory at @P" + std::to_string(last_access_pc - module_low_) + "@";
  if (last_place) text += "; last barrier or simd operation" + place_text(last_place);
  return text;
}

void check_deadline() {
  if (is_expired) {
    is_expired = 0;
    report("endless-loop", 0, overtime_text(), true);
  }
}

namespace {
void set_timer(double seconds) {
  itimerspec spec{};
  spec.it_value.tv_sec = time_t(seconds);
  spec.it_value.tv_nsec = long((seconds - double(time_t(seconds))) * 1e9);
  timer_settime(timer, 0, &spec, nullptr);
}

void on_signal(int signal, siginfo_t* info, void* context) {
  if (!is_running) {  // not ours: as if we were not here
    const struct sigaction& old = old_actions[signal];
    if ((old.sa_flags & SA_SIGINFO) && old.sa_sigaction) return old.sa_sigaction(signal, info, context);
    if (old.sa_handler != SIG_DFL && old.sa_handler != SIG_IGN) return old.sa_handler(signal);
    ::signal(signal, SIG_DFL);
    raise(signal);
    return;
  }
  const uintptr_t pc = uintptr_t(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
  if (signal == kTimerSignal) {
    // In the kernel's own code it is safe to leave at once; elsewhere the next check does, or the next signal.
    is_expired = 1;
    if (!is_kernel_code(pc)) return set_timer(0.05);
    report("endless-loop", pc, overtime_text(), true);
  }
  const uintptr_t address = uintptr_t(info->si_addr);
  if (signal == SIGSEGV && address - current->stack < 4096)
    report("stack-overflow", pc, thread_text(*current) + " has more than 60 KiB of private variables", true);
  report(signal == SIGFPE ? "undefined-behaviour" : "crash", pc,
         thread_text(*current) + " stops with signal " + std::to_string(signal), true);
}

const int kSignals[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, kTimerSignal};

void run_all(const u32 grid[3], const u32 wanted[3], u64 seed) {
  u32 launch[3], groups[3];
  for (int i = 0; i < 3; i++) {
    launch[i] = std::min(wanted[i], grid[i]);
    groups[i] = (grid[i] + launch[i] - 1) / launch[i];
  }
  const u32 count = groups[0] * groups[1] * groups[2];
  std::vector<u32> order(count);
  for (u32 i = 0; i < count; i++) order[i] = i;
  if (seed)
    for (u32 i = count; i > 1; i--) std::swap(order[i - 1], order[random_below(i)]);
  for (u32 index : order) {
    const u32 at[3] = {index % groups[0], index / groups[0] % groups[1], index / (groups[0] * groups[1])};
    u32 threads[3];  // the last threadgroup of a dimension may be ragged
    for (int i = 0; i < 3; i++) threads[i] = std::min(launch[i], grid[i] - at[i] * launch[i]);
    group_index = index + 1;
    start_group_memory();
    run_threadgroup(at, threads, launch, groups, grid);
    if (is_over) return;
    end_group_memory();
  }
}
}  // namespace

struct LaunchRequest {
  void (*entry)(const u64*, const u32*);
  const u64* arguments;
  u64 num_arguments, group_low, group_high, module_low, module_high, seed;
  double cpu_seconds;
  u32 grid[3], threadgroup[3];
  u32 granule, count_lines;
  const u64* variables;  // offset and size of each threadgroup variable
  u64 num_variables;
};

// Returns the number of errors.
API int msl_launch(const LaunchRequest* request) {
  errors.clear();
  reported.clear();
  num_errors = 0;
  is_over = false;
  is_expired = 0;
  last_access_pc = 0;
  last_place = 0;
  module_low_ = request->module_low;
  launch_arguments = request->arguments;
  launch_num_arguments = u32(request->num_arguments);
  start_schedule(request->entry, request->arguments, request->seed);
  start_memory(request->group_low, request->group_high, request->module_low, request->module_high, request->granule,
               request->count_lines, request->variables, request->num_variables);

  static u8 signal_stack[64 * 1024];
  stack_t own{}, old_stack;
  own.ss_sp = signal_stack;
  own.ss_size = sizeof signal_stack;
  sigaltstack(&own, &old_stack);
  struct sigaction action{};
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int signal : kSignals) sigaction(signal, &action, &old_actions[signal]);
  sigevent event{};
  event.sigev_notify = SIGEV_THREAD_ID;
  event.sigev_signo = kTimerSignal;
  event._sigev_un._tid = pid_t(syscall(SYS_gettid));
  timer_create(CLOCK_THREAD_CPUTIME_ID, &event, &timer);
  set_timer(request->cpu_seconds);
  is_running = true;
  run_all(request->grid, request->threadgroup, request->seed);
  is_running = false;
  timer_delete(timer);
  for (int signal : kSignals) sigaction(signal, &old_actions[signal], nullptr);
  sigaltstack(&old_stack, nullptr);
  return num_errors;
}

API const char* msl_errors() { return errors.c_str(); }
API const Counters* msl_counters() { return &counters; }

// ------------------------------------------------- called by UBSan's minimal instrumentation
#define PC (reinterpret_cast<uintptr_t>(__builtin_return_address(0)) - 1)
#define UNDEFINED(name, kind, text) \
  API void __ubsan_handle_##name##_minimal() { report(kind, PC, thread_text(*current) + ": " text, true); }
UNDEFINED(type_mismatch, "misaligned", "access that is not aligned for its type")
UNDEFINED(alignment_assumption, "misaligned", "access that is not aligned for its type")
UNDEFINED(add_overflow, "integer-overflow", "signed addition overflows")
UNDEFINED(sub_overflow, "integer-overflow", "signed subtraction overflows")
UNDEFINED(mul_overflow, "integer-overflow", "signed multiplication overflows")
UNDEFINED(negate_overflow, "integer-overflow", "negation overflows")
UNDEFINED(implicit_conversion, "integer-overflow", "implicit conversion to a narrower integer loses the value")
UNDEFINED(divrem_overflow, "undefined-behaviour", "integer division by zero, or its result overflows")
UNDEFINED(out_of_bounds, "out-of-bounds", "array index out of range")
UNDEFINED(float_cast_overflow, "undefined-behaviour", "a float outside of the integer's range is converted to it")

// ------------------------------------------------------ conversions that clang calls for bfloat
// __bf16 and float both come back in the low bits of xmm0, so a float with the right bits serves as a __bf16.
static float rounded_to_bfloat(float x) {
  u32 bits;
  memcpy(&bits, &x, 4);
  bits = (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  bits &= 0xffff;
  memcpy(&x, &bits, 4);
  return x;
}
API float __truncsfbf2(float x) { return rounded_to_bfloat(x); }
API float __truncdfbf2(double x) { return rounded_to_bfloat(float(x)); }
