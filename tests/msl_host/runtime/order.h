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

// The access that is being checked.
struct Now {
  Access access;
  bool is_device;
};
inline Now now_in(bool is_device) {
  const u32 flag = is_device ? kMemDevice : kMemThreadgroup;
  return {{group_index, group_epoch[flag], u16(simdgroups[current->simdgroup].epoch[flag]), u16(current->thread)},
          is_device};
}

inline bool happens_before(const Access& a, const Now& now) {
  if (!a.group) return true;
  if (a.group != now.access.group) return !now.is_device;  // other threadgroups have their own threadgroup memory
  if (a.thread == now.access.thread || a.epoch != now.access.epoch) return true;
  return a.thread / kLanes == now.access.thread / kLanes && a.simd_epoch != now.access.simd_epoch;
}

// All of the set happen before.
inline bool all_happen_before(const Accesses& set, const Now& now) {
  if (!happens_before(set.last, now) || !happens_before(set.other, now)) return false;
  if (set.several_lanes && set.last.group == now.access.group && set.last.epoch == now.access.epoch &&
      set.last.simd_epoch == now.access.simd_epoch && set.last.thread / kLanes == now.access.thread / kLanes)
    return false;
  return !now.is_device || !set.earlier_group || set.earlier_group == now.access.group;
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

inline std::string access_text(const Access& a) {
  if (a.group != group_index) return "threadgroup number " + std::to_string(a.group - 1);
  return "thread " + std::to_string(a.thread) + " of this threadgroup (simdgroup " + std::to_string(a.thread / kLanes) +
         ")";
}
// Who made the access of the set that does not happen before.
inline std::string culprit_text(const Accesses& set, const Now& now) {
  for (const Access* a : {&set.last, &set.other})
    if (!happens_before(*a, now)) return access_text(*a);
  return set.last.group == now.access.group && set.several_lanes ? "another lane of its simdgroup"
                                                                 : "another threadgroup";
}
