// Segments that run in parts: op by op while a program of their own is made, or around an op that cannot
// be compiled.
#pragma once

#include "execution/program.h"

#include <utility>
#include <vector>

namespace tpu {

// Nodes, in ascending order, as a segment of their own. Nodes that read a failed value fail with it and are
// left out. Its values stay in `s` as well, so that all of them are results and none is donated.
Segment part_of(const Segment& s, const std::vector<size_t>& nodes);

// For each node the slots that no later one reads or makes: the segment lets go of them there.
std::vector<std::vector<uint32_t>> last_uses(const Segment& s);

// Runs a segment that cannot be compiled in parts, so that only the op at fault and what depends on it
// fail. The caller raises the error.
void run_apart(Segment& s, const PythonError& error);

// Runs what does not follow from inputs that failed; the rest fails with them.
void run_others(Segment& s);

// Nodes of a segment that run as one of their own, by a program or by CPU kernels.
struct Part {
  size_t begin, end;
  bool on_host;
};

// Runs a segment part by part, or op by op where there are no parts. What fails fails with what depends on
// it, and is thrown once the others have run; the segment has no ops then. Where memory is short the rest
// does not run.
void run_in_pieces(Segment& s, const std::vector<Part>& parts = {});

// Whether a segment may run op by op within the memory that is set as limit, and what it writes can be given
// back. Holds the GIL.
bool fits_in_pieces(const Segment& s);

// Ops that no program in memory runs by themselves, one of a kind: (key of the program, node).
std::vector<std::pair<Hash128, uint32_t>> missing_pieces(const Segment& s);

}  // namespace tpu
