// What the runtime offers to kernels. `place` is a position in the source: line << 10 | column.
#pragma once

// A default argument is evaluated at the call: each call of a synchronising function tells where it stands. Return
// addresses would not do, since the optimiser duplicates calls.
#define MSL_PLACE uint place = (uint(__builtin_LINE()) << 10) | (uint(__builtin_COLUMN()) & 1023u)

enum msl_type { MSL_UINT, MSL_INT, MSL_FLOAT };
enum msl_reduction {
  MSL_SUM, MSL_PRODUCT, MSL_MIN, MSL_MAX, MSL_AND, MSL_OR, MSL_XOR,
  MSL_INCLUSIVE_SUM, MSL_EXCLUSIVE_SUM, MSL_INCLUSIVE_PRODUCT, MSL_EXCLUSIVE_PRODUCT
};
enum msl_shuffle {
  MSL_BROADCAST, MSL_BROADCAST_FIRST, MSL_SHUFFLE, MSL_SHUFFLE_XOR, MSL_SHUFFLE_UP, MSL_SHUFFLE_DOWN,
  MSL_ROTATE_UP, MSL_ROTATE_DOWN, MSL_FILL_UP, MSL_FILL_DOWN
};
enum msl_matrix_op { MSL_MATRIX_LOAD, MSL_MATRIX_STORE };
enum msl_atomic_op {
  MSL_ATOMIC_LOAD, MSL_ATOMIC_STORE, MSL_ATOMIC_EXCHANGE, MSL_ATOMIC_ADD, MSL_ATOMIC_SUB, MSL_ATOMIC_MIN,
  MSL_ATOMIC_MAX, MSL_ATOMIC_AND, MSL_ATOMIC_OR, MSL_ATOMIC_XOR, MSL_ATOMIC_COMPARE
};

extern "C" {
void __msl_threadgroup_barrier(uint flags, uint place);
void __msl_simdgroup_barrier(uint flags, uint place);
uint __msl_reduce(uint op, uint type, uint bits, uint place);
uint __msl_shuffle(uint op, uint bits, uint fill, uint arg, uint place);
ulong __msl_ballot(uint predicate, uint place);
void __msl_matrix(uint op, uint place);
float2 __msl_multiply(float2 a, float2 b, float2 c, uint place);
uint __msl_lane(void);
uint __msl_atomic(uint op, uint type, ulong address, uint bits, uint expected, uint place);
}
