// Calls that run by a CPU kernel in place of being recorded: the long way, for whatever a DirectCall leaves.
#include "execution/host_kernels.h"
#include "recorder/record.h"
#include "recorder/threads.h"
#include "recorder/tier_key.h"

namespace tpu {

void enter_host_op(Trace& trace, const Mode& m, uint64_t op) {
  TPU_ASSERT_LOCKED();
  auto& tiering = trace.tiering;
  tiering.runs_on_host(op);
  const auto most = static_cast<size_t>(m.max_ops ? m.max_ops : SIZE_MAX);
  if (tiering.size() >= most ||
      (m.repetitions && trace.cut_points.after_op(op, tiering.size(), most)))
    tiering.end_after_op();
}

bool run_on_host(const OpDescription& d, const c10::IValue* args, Recorded& recorded) {
  const Mode m = mode();
  const bool may_record = tiers() == Tiers::Auto && m.max_ops != 1;
  const HostCall call(d, args);
  if (!call && !may_record) return false;
  WithoutGil no_gil;
  Lock lock(g_mutex);
  while (true) {
    Call c;
    gather(c, d, args, d.policies.size());
    Trace* trace = current_trace(c.device < 0 ? current_device() : c.device);
    if (trace->capture) return false;
    auto& tiering = trace->tiering;
    const auto op = recorded.op = tier_key(d, args);
    if (may_record) {
      if (d.has_handler()) {  // such as `nonzero`: programs end before it
        if (tiering.is_recording()) {
          flush(trace, lock, "an op of the host's");
          continue;
        }
        tiering.end();
      } else {
        const auto choice = tiering.choose(op);
        if (choice == Tiering::Choice::Record) return false;
        if (choice == Tiering::Choice::Cut) {
          flush(trace, lock, kForHost);
          continue;
        }
      }
    }
    if (!call) return false;
    const auto started = kernel_clock();
    recorded.results = call.run(c, lock);
    if (!recorded.results) return false;
    if (!may_record) return true;
    tiering.took(kernel_clock() - started);
    lock.lock();
    enter_host_op(*trace, m, op);
    if (d.has_handler()) tiering.end();
    return true;
  }
}

}  // namespace tpu
