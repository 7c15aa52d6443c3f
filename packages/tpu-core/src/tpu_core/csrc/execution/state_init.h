// State that a loop's first round makes: an optimizer's moments, filled with zeros and updated in place.
#pragma once

#include "execution/program.h"

namespace tpu {

// `run`, but where there is no program for the segment, what it makes as constants just to update it in
// place runs first, by itself. The rest is the segment that comes in every later round, where the state
// is an input, so that one program serves them all.
void run_after_new_state(Segment& s, Cut& c);

void forget_new_state();  // with the programs; needs the GIL

}  // namespace tpu
