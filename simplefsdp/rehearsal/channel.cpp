// A channel on CPU: collectives one after the other, each for its modelled time, on a thread that Python's lock cannot
// hold up. Inputs are read and outputs written at the end of that time, not before.
//
// Compiled by TorchInductor's own loader, called through ctypes. Times are nanoseconds of the steady clock, which is
// Python's time.perf_counter_ns().
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#ifdef __linux__
#include <sys/prctl.h>
#endif

struct Copy {  // out[i] = factor * in, for i < times; bytes of one
  char* out;
  const char* in;
  int64_t bytes, times;
  double factor;
  int64_t type;  // index into _TYPES of channel.py; only used where the factor is not 1
};

struct Job {
  int64_t issued, started, finished, moved = 0;  // modelled, all but `moved`: when the data really was there
  std::deque<Copy> copies;
  std::atomic<bool> done{false};
};

namespace {

using Clock = std::chrono::steady_clock;
constexpr int64_t kSpin = 60'000;  // a sleeping thread wakes up about this late
constexpr int64_t kSlice = 50'000'000;  // of longer sleeps, to see that the channel was closed

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count();
}

void sleep_until(int64_t time) {
  if (time - now() > kSpin)
    std::this_thread::sleep_until(Clock::time_point(std::chrono::nanoseconds(time - kSpin)));
  while (now() < time) std::this_thread::yield();
}

struct BFloat16 {
  uint16_t bits;
  operator double() const {
    uint32_t wide = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &wide, 4);
    return value;
  }
  BFloat16(double value) {
    float narrow = float(value);
    uint32_t wide;
    std::memcpy(&wide, &narrow, 4);
    bits = narrow != narrow ? 0x7fc0 : uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16);  // to nearest, even
  }
};

template <typename T>
void scale(const Copy& copy) {
  auto in = reinterpret_cast<const T*>(copy.in);
  auto out = reinterpret_cast<T*>(copy.out);
  for (int64_t i = 0; i < copy.bytes / int64_t(sizeof(T)); i++) out[i] = T(double(in[i]) * copy.factor);
}

template <typename T>
void scale_integers(const Copy& copy) {
  auto in = reinterpret_cast<const T*>(copy.in);
  auto out = reinterpret_cast<T*>(copy.out);
  for (int64_t i = 0; i < copy.bytes / int64_t(sizeof(T)); i++) out[i] = T(in[i] * int64_t(copy.factor));
}

void move(const Copy& copy) {
  if (copy.factor != 1) {
    switch (copy.type) {
      case 0: return scale<float>(copy);
      case 1: return scale<double>(copy);
      case 2: return scale<BFloat16>(copy);
      case 3: return scale<_Float16>(copy);
      case 4: return scale_integers<int64_t>(copy);
      case 5: return scale_integers<int32_t>(copy);
      case 6: return scale_integers<int16_t>(copy);
      case 7: return scale_integers<int8_t>(copy);
      case 8: return scale_integers<uint8_t>(copy);
    }
  }
  for (int64_t i = 0; i < copy.times; i++)
    if (copy.out + i * copy.bytes != copy.in) std::memcpy(copy.out + i * copy.bytes, copy.in, copy.bytes);
}

class Channel {
 public:
  Channel() : thread_([this] { run(); }) {}

  ~Channel() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_one();
    thread_.join();
    for (Job* job : jobs_) job->done = true;  // never carried, but nobody waits for ever
  }

  Job* issue(int64_t nanoseconds, const Copy* copies, int64_t count) {
    auto job = new Job;
    job->copies.assign(copies, copies + count);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      job->issued = now();
      job->started = free_at_ > job->issued ? free_at_ : job->issued;
      job->finished = free_at_ = job->started + nanoseconds;
      jobs_.push_back(job);
    }
    changed_.notify_one();
    return job;
  }

 private:
  void run() {
#ifdef __linux__
    prctl(PR_SET_TIMERSLACK, 1000);
#endif
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
      if (closed_) return;
      Job* job = jobs_.front();
      jobs_.pop_front();
      lock.unlock();
      carry(*job);
      lock.lock();
    }
  }

  void carry(Job& job) {
    int64_t bytes = 0;
    for (const Copy& copy : job.copies) bytes += copy.bytes * copy.times;
    int64_t start_at = job.finished - int64_t(bytes * nanoseconds_per_byte_);
    for (int64_t next; !closed_ && (next = now() + kSlice) < start_at;) sleep_until(next);
    if (closed_) {
      job.done = true;
      return;
    }
    sleep_until(start_at);
    int64_t start = now();
    for (const Copy& copy : job.copies) move(copy);
    if (bytes > 65536) nanoseconds_per_byte_ += 0.2 * (double(now() - start) / bytes - nanoseconds_per_byte_);
    sleep_until(job.finished);
    job.moved = now();
    job.done.store(true, std::memory_order_release);
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job*> jobs_;
  int64_t free_at_ = 0;
  std::atomic<bool> closed_{false};
  double nanoseconds_per_byte_ = 0.2;  // of the copies here, measured as they are made
  std::thread thread_;
};

}  // namespace

extern "C" {

Channel* channel_open() { return new Channel; }

void channel_close(Channel* channel) { delete channel; }

Job* channel_issue(Channel* channel, int64_t nanoseconds, const Copy* copies, int64_t count) {
  return channel->issue(nanoseconds, copies, count);
}

bool job_done(const Job* job) { return job->done.load(std::memory_order_acquire); }

int64_t job_wait(const Job* job) {  // nanoseconds that the caller was blocked
  if (job_done(job)) return 0;
  int64_t start = now();
  for (int64_t next; !job_done(job) && (next = now() + kSlice) < job->finished;) sleep_until(next);
  if (!job_done(job)) sleep_until(job->finished);
  while (!job_done(job)) std::this_thread::yield();
  return now() - start;
}

void job_times(const Job* job, int64_t* times) {
  times[0] = job->issued, times[1] = job->started, times[2] = job->finished, times[3] = job->moved;
}

void job_free(Job* job) { delete job; }
}
