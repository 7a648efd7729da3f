// mbarrier.cuh - barriers in shared memory. A phase completes when all arrivals and all announced bytes have come in.
//
// A waiter names the parity of the phase that it waits for (0 for the first) and must not let two phases pass unseen.
#pragma once

namespace hw {

using Mbarrier = uint64_t;

// mbarrier.init. Called by one lane for all barriers (per-lane addresses would be serialised lane by lane).
MF_DEVICE void mbarrier_init(Mbarrier *bar, uint32_t arrivals)
{
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}

// fence.mbarrier_init: makes the initialisation visible to the async proxy. A CTA barrier must follow for the other threads.
MF_DEVICE void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// mbarrier.arrive: one arrival, with release of this thread's earlier accesses.
MF_DEVICE void mbarrier_arrive(Mbarrier *bar) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(bar)) : "memory"); }

// mbarrier.arrive.expect_tx: one arrival that announces `bytes` of bulk copies to the current phase.
MF_DEVICE void mbarrier_arrive_expect(Mbarrier *bar, uint32_t bytes)
{
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}

// mbarrier.try_wait.parity (acquire): true if the phase of that parity has completed. May suspend the thread for a while.
MF_DEVICE bool mbarrier_try_wait(Mbarrier *bar, uint32_t parity)
{
  uint32_t ok;
  asm volatile("{\n.reg .pred P;\n"
               "mbarrier.try_wait.parity.shared::cta.b64 P, [%1], %2;\n"
               "selp.u32 %0, 1, 0, P;\n}"
               : "=r"(ok) : "r"(shared_address(bar)), "r"(parity) : "memory");
  return ok != 0;
}

// mbarrier.test_wait.parity (acquire): likewise, at once. Asked early, its latency hides behind what is done before the answer counts; an answer that it has not completed may be old.
MF_DEVICE bool mbarrier_test(Mbarrier *bar, uint32_t parity)
{
  uint32_t ok;
  asm volatile("{\n.reg .pred P;\n"
               "mbarrier.test_wait.parity.shared::cta.b64 P, [%1], %2;\n"
               "selp.u32 %0, 1, 0, P;\n}"
               : "=r"(ok) : "r"(shared_address(bar)), "r"(parity) : "memory");
  return ok != 0;
}

// Waits for the phase of that parity (acquire). False if the watchdog gave up; always true without one.
MF_DEVICE bool mbarrier_wait(Mbarrier *bar, uint32_t parity, const Watchdog &dog, int id)
{
  if(mbarrier_try_wait(bar, parity))
    return true;
  Spin spin;
  do {
    if(!spin.again(dog, id))
      return false;
  } while(!mbarrier_try_wait(bar, parity));
  return true;
}

} // namespace hw
