// Placement of one thread through the system's scheduler.
#include "base/thread_settings.h"

#include <sched.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"

namespace v100 {

namespace {

constexpr int kNiceValues[] = {10, 0, -5, -10};  // of priorities -1 to 2

void choose_cpus(const std::vector<int32_t>& cpus) {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int32_t cpu : cpus) {
    if (cpu < 0 || cpu >= CPU_SETSIZE)
      throw InvalidArgument("processor " + std::to_string(cpu) + " is out of range, expected 0 to " +
                            std::to_string(CPU_SETSIZE - 1));
    CPU_SET(static_cast<size_t>(cpu), &set);
  }
  if (sched_setaffinity(0, sizeof set, &set) != 0)
    throw InvalidArgument("the system refuses the chosen processors for a thread: " + std::string(strerror(errno)));
}

void choose_priority(int32_t priority) {
  if (priority < -1 || priority > 3)
    throw InvalidArgument("priority is " + std::to_string(priority) + ", expected -1 to 3");
  int result = 0;
  if (priority == 3) {
    const sched_param param{.sched_priority = 1};
    result = sched_setscheduler(0, SCHED_RR, &param);
  } else {
    const auto thread = static_cast<id_t>(syscall(SYS_gettid));  // Linux keeps nice values by thread
    result = setpriority(PRIO_PROCESS, thread, kNiceValues[priority + 1]);
  }
  if (result != 0)
    throw InvalidArgument("the system refuses thread priority " + std::to_string(priority) + ": " + strerror(errno));
}

}  // namespace

void place_this_thread(const ThreadSettings& settings, int32_t thread) {
  if (!settings.cpus.empty()) choose_cpus(settings.cpus[static_cast<size_t>(thread) % settings.cpus.size()]);
  if (settings.priority != 0) choose_priority(settings.priority);
}

}  // namespace v100
