// What a simdgroup's lanes do together: reductions, shuffles, 8x8 matrices; and atomics.
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "runtime.h"

namespace {
const char* const kReduceNames[] = {
    "simd_sum", "simd_product", "simd_min", "simd_max", "simd_and/simd_all", "simd_or/simd_any", "simd_xor",
    "simd_prefix_inclusive_sum", "simd_prefix_exclusive_sum", "simd_prefix_inclusive_product",
    "simd_prefix_exclusive_product"};
const char* const kShuffleNames[] = {
    "simd_broadcast", "simd_broadcast_first", "simd_shuffle", "simd_shuffle_xor", "simd_shuffle_up",
    "simd_shuffle_down", "simd_shuffle_rotate_up", "simd_shuffle_rotate_down", "simd_shuffle_and_fill_up",
    "simd_shuffle_and_fill_down"};
enum { kUint, kInt, kFloat };
}  // namespace

std::string operation_name(u32 operation) {
  if (operation < kShuffle) return kReduceNames[operation];
  if (operation < kBallot) return kShuffleNames[operation - kShuffle];
  if (operation == kBallot) return "simd_ballot";
  if (operation == kMatrix) return "simdgroup_load";
  if (operation == kMatrix + 1) return "simdgroup_store";
  if (operation == kMultiply) return "simdgroup_multiply";
  return "simdgroup_barrier";
}

namespace {
template <class T>
T combine(u32 op, T a, T b) {
  switch (op) {
    case 0: case 7: case 8: return T(a + b);
    case 1: case 9: case 10: return T(a * b);
    case 2: return b < a ? b : a;
    case 3: return a < b ? b : a;
    default: abort();
  }
}
float combine_float(u32 op, float a, float b) {
  if (op == 2) return fminf(a, b);
  if (op == 3) return fmaxf(a, b);
  return combine<float>(op, a, b);
}
u32 combine_bits(u32 op, u32 type, u32 a, u32 b) {
  if (op == 4) return a & b;
  if (op == 5) return a | b;
  if (op == 6) return a ^ b;
  if (type == kFloat) {
    float x, y;
    memcpy(&x, &a, 4);
    memcpy(&y, &b, 4);
    x = combine_float(op, x, y);
    memcpy(&a, &x, 4);
    return a;
  }
  // Sums and products of two's complement are the same for signed and unsigned.
  return type == kInt && (op == 2 || op == 3) ? u32(combine<int>(op, int(a), int(b))) : combine<u32>(op, a, b);
}
}  // namespace

API void __msl_simdgroup_barrier(u32 flags, u32 place) {
  Exchange& exchange = meet(kSimdgroupBarrier, place);
  if (exchange.is_done) return;
  exchange.is_done = true;
  counters.simdgroup_barriers++;
  for (u32 flag : {kMemDevice, kMemThreadgroup})
    if (flags & flag) simdgroups[current->simdgroup].epoch[flag]++;
}

API u32 __msl_reduce(u32 op, u32 type, u32 bits, u32 place) {
  to_bring().value[current->lane] = bits;
  Exchange& exchange = meet(kReduce + op, place);
  if (exchange.is_done) return exchange.other[current->lane];
  exchange.is_done = true;
  const bool is_prefix = op >= 7, is_inclusive = op == 7 || op == 9;
  const float one = 1.0f;
  u32 running = 0;
  if (op == 10) memcpy(&running, &one, 4);
  if (op == 10 && type != kFloat) running = 1;
  bool is_first = !is_prefix || is_inclusive;
  for (u32 lane = 0; lane < kLanes; lane++) {
    if (!(exchange.lanes >> lane & 1)) continue;
    if (is_prefix && !is_inclusive) exchange.other[lane] = running;
    running = is_first ? exchange.value[lane] : combine_bits(op, type, running, exchange.value[lane]);
    is_first = false;
    if (is_inclusive) exchange.other[lane] = running;
  }
  if (!is_prefix)
    for (u32 lane = 0; lane < kLanes; lane++) exchange.other[lane] = running;
  return exchange.other[current->lane];
}

API u32 __msl_shuffle(u32 op, u32 bits, u32 fill, u32 arg, u32 place) {
  to_bring().value[current->lane] = bits;
  const Exchange& exchange = meet(kShuffle + op, place);
  const u32 lane = current->lane;
  u32 from = lane;
  switch (op) {
    case 0: case 2: from = arg; break;
    case 1: from = u32(__builtin_ctz(exchange.lanes)); break;
    case 3: from = lane ^ arg; break;
    case 4: from = lane - arg; break;
    case 5: from = lane + arg; break;
    case 6: from = (lane - arg) % kLanes; break;
    case 7: from = (lane + arg) % kLanes; break;
    case 8: if (lane < arg) return fill; from = lane - arg; break;
    case 9: if (lane + arg >= kLanes) return fill; from = lane + arg; break;
  }
  // Up and down past the end keep the lane's own value.
  if (from >= kLanes && (op == 4 || op == 5)) return bits;
  if (from >= kLanes || !(exchange.lanes >> from & 1))
    report("inactive-lane", 0,
           thread_text(*current) + " reads lane " + std::to_string(int(from)) + " by " + kShuffleNames[op] +
               place_text(place) + ", and that lane takes no part",
           true);
  return exchange.value[from];
}

API u64 __msl_ballot(u32 predicate, u32 place) {
  to_bring().value[current->lane] = predicate;
  const Exchange& exchange = meet(kBallot, place);
  u64 bits = 0;
  for (u32 lane = 0; lane < kLanes; lane++)
    if ((exchange.lanes >> lane & 1) && exchange.value[lane]) bits |= u64(1) << lane;
  return bits;
}

namespace {
void need_whole_simdgroup(const Exchange& exchange, u32 operation, u32 place) {
  if (exchange.lanes != ~0u)
    report("inactive-lane", 0,
           operation_name(operation) + place_text(place) + " by " + thread_text(*current) +
               ", but its simdgroup has fewer than 32 running threads",
           true);
}
// Where the matrix element with this row and column lives: lane and which of its two.
u32 lane_of(u32 row, u32 column) { return (row & 4) * 4 + (column & 4) * 2 + (row & 3) * 2 + (column & 2) / 2; }
}  // namespace

API void __msl_matrix(u32 op, u32 place) { need_whole_simdgroup(meet(kMatrix + op, place), kMatrix + op, place); }

typedef float float2 __attribute__((vector_size(8)));
API float2 __msl_multiply(float2 a, float2 b, float2 c, u32 place) {
  Exchange& mine = to_bring();
  for (u32 j = 0; j < 2; j++) {
    mine.left[current->lane][j] = a[j];
    mine.right[current->lane][j] = b[j];
    mine.sum[current->lane][j] = c[j];
  }
  Exchange& exchange = meet(kMultiply, place);
  need_whole_simdgroup(exchange, kMultiply, place);
  if (!exchange.is_done) {
    exchange.is_done = true;
    counters.matrix_multiplies++;
    float left[64], right[64];
    for (u32 at = 0; at < 64; at++) {
      const u32 lane = lane_of(at / 8, at % 8);
      left[at] = exchange.left[lane][at & 1];
      right[at] = exchange.right[lane][at & 1];
      exchange.product[at] = exchange.sum[lane][at & 1];
    }
    for (u32 row = 0; row < 8; row++)
      for (u32 k = 0; k < 8; k++)
        for (u32 column = 0; column < 8; column++)
          exchange.product[row * 8 + column] += left[row * 8 + k] * right[k * 8 + column];
  }
  const u32 lane = current->lane, row = (lane / 4 & 4) + lane / 2 % 4, column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  return float2{exchange.product[row * 8 + column], exchange.product[row * 8 + column + 1]};
}

API u32 __msl_lane() { return current->lane; }

API u32 __msl_atomic(u32 op, u32 type, u64 address, u32 bits, u32 expected, u32) {
  enum { kLoad, kStore, kExchange, kAdd, kSub, kMin, kMax, kAnd, kOr, kXor, kCompare };
  counters.atomics++;
  mark_atomic(address, op != kStore, op != kLoad, reinterpret_cast<uintptr_t>(__builtin_return_address(0)) - 1);
  u32* at = reinterpret_cast<u32*>(address);
  const u32 old = *at;
  switch (op) {
    case kLoad: break;
    case kStore: case kExchange: *at = bits; break;
    case kAdd: *at = combine_bits(0, type, old, bits); break;
    case kSub:
      if (type == kFloat) bits ^= 0x80000000u;
      *at = combine_bits(0, type, old, type == kFloat ? bits : -bits);
      break;
    case kMin: *at = combine_bits(2, type, old, bits); break;
    case kMax: *at = combine_bits(3, type, old, bits); break;
    case kAnd: *at = old & bits; break;
    case kOr: *at = old | bits; break;
    case kXor: *at = old ^ bits; break;
    case kCompare: if (old == expected) *at = bits; break;
  }
  return old;
}
