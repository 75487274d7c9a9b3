// Which accesses of a place are ordered: by threadgroup barriers, by simdgroup barriers, or by being one thread's.
#pragma once
#include "runtime.h"

// One access, as far as the order of two accesses depends on it.
struct Access {
  u32 group;  // threadgroup, 0 for none
  u32 epoch;  // threadgroup barriers before it
  u16 simd_epoch, thread;
};
// The last accesses of one kind to one place. `last` and `other` are of different simdgroups: within one epoch two are
// enough, since a third thread conflicts with at least one of them.
struct Accesses {
  Access last, other;
  u32 earlier_group;  // that also accessed it: kSeveral for more than one
  bool several_lanes;  // of last's simdgroup, in last's epoch
};
constexpr u32 kSeveral = ~0u;
inline bool happens_before(const Access& a, u32 flag, bool is_device) {
  if (!a.group) return true;
  if (a.group != group_index) return !is_device;  // other threadgroups have their own threadgroup memory
  if (a.thread == current->thread || a.epoch != group_epoch[flag]) return true;
  return a.thread / kLanes == current->simdgroup && a.simd_epoch != u16(simdgroups[current->simdgroup].epoch[flag]);
}

inline Access access_now(u32 flag) {
  return {group_index, group_epoch[flag], u16(simdgroups[current->simdgroup].epoch[flag]), u16(current->thread)};
}

inline void remember(Accesses& set, const Access& now) {
  Access& last = set.last;
  const bool is_same_group = last.group == now.group;
  const bool is_same_epoch = is_same_group && last.epoch == now.epoch && last.simd_epoch == now.simd_epoch;
  if (last.group && !is_same_group)
    set.earlier_group = !set.earlier_group || set.earlier_group == last.group ? last.group : kSeveral;
  if (is_same_group && last.thread / kLanes != now.thread / kLanes) {
    set.other = last;
    set.several_lanes = false;
  } else if (!is_same_epoch) {
    set.several_lanes = false;
  } else if (last.thread != now.thread) {
    set.several_lanes = true;
  }
  last = now;
}

inline std::string other_text(const Access& a) {
  if (a.group != group_index) return "threadgroup number " + std::to_string(a.group - 1);
  return "thread " + std::to_string(a.thread) + " of this threadgroup (simdgroup " +
         std::to_string(a.thread / kLanes) + ")";
}
// The access of the set that is not ordered before one of the current thread, as text; empty if all are.
inline std::string conflict_in(const Accesses& set, u32 flag, bool is_device) {
  for (const Access* a : {&set.last, &set.other})
    if (!happens_before(*a, flag, is_device)) return other_text(*a);
  const Access now = access_now(flag);
  if (set.several_lanes && set.last.group == now.group && set.last.epoch == now.epoch &&
      set.last.simd_epoch == now.simd_epoch && set.last.thread / kLanes == current->simdgroup)
    return "another lane of its simdgroup";
  if (is_device && set.earlier_group && set.earlier_group != group_index) return "another threadgroup";
  return "";
}
