#include "pearl/training_loop.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <exception>
#include <utility>

namespace pearl {
namespace {

// How long the thread stays awake between two batches: waking it takes longer than drawing a small batch.
constexpr auto kLinger = std::chrono::microseconds(500);

}  // namespace

TrainingLoop::TrainingLoop(SumTreeReplay& replay, const ColumnStore& storage, learner::Algorithm& algorithm,
                           std::size_t batch_size, const Queues& queues, std::vector<Weights> policy,
                           std::size_t interval, bool prefetch)
    : GrantedLoop(batch_size, queues, std::move(policy), interval),
      replay_(replay),
      storage_(storage),
      algorithm_(algorithm),
      drawn_(prefetch ? 2 : 1),
      priorities_(batch_size),
      prefetch_(prefetch),
      pool_(prefetch ? 2 : 1, kLinger) {
  std::vector<std::size_t> stored;
  for (const ColumnStore::Column& column : storage.columns()) stored.push_back(column.item_bytes);
  check_rows(algorithm.item_bytes(), stored, replay.capacity(), storage.capacity());
  for (Drawn& drawn : drawn_) {
    for (const std::size_t bytes : stored) {
      drawn.columns.emplace_back(batch_size * bytes);
      drawn.targets.push_back(drawn.columns.back().data());
    }
    drawn.indices.resize(batch_size);
    drawn.weights.resize(batch_size);
    drawn.generations.resize(batch_size);
    const auto floats = [&](std::size_t i) { return reinterpret_cast<const float*>(drawn.columns[i].data()); };
    const void* actions = drawn.columns[1].data();
    drawn.batch = {batch_size, floats(0), actions, floats(2), floats(3), floats(4), drawn.weights.data(), nullptr};
    if (stored.size() > learner::kColumns)
      drawn.batch.next_masks = reinterpret_cast<const std::uint8_t*>(drawn.columns[learner::kColumns].data());
  }
  pool_.start();  // may throw here, but not later: the Learner's threads, which offer batches, must not throw
  restart();
}

void TrainingLoop::draw(Drawn& drawn, double beta, Stopwatch& watch) {
  window_.enter_sampling();
  watch.begin();  // waiting for the host's insertion does not count as sampling
  try {
    replay_.sample(drawn.batch.rows, beta, drawn.indices.data(), drawn.weights.data(), drawn.generations.data());
    if (banked_) {
      const SampledMass own = replay_.sampled_mass();
      const double factor = bank_factor(own, beta);
      for (float& weight : drawn.weights) weight = static_cast<float>(weight * factor);
      least_ = std::min(least_, own.least);
    }
    watch.lap(&Seconds::sample);
    storage_.gather(drawn.indices.data(), drawn.batch.rows, storage_.capacity(), drawn.targets);
    watch.lap(&Seconds::gather);
  } catch (...) {
    window_.leave_sampling();
    throw;
  }
  window_.leave_sampling();
}

double TrainingLoop::bank_factor(const SampledMass& own, double beta) const {
  double total = own.mass;
  double smallest = own.mass > 0.0 ? own.least : std::numeric_limits<double>::infinity();
  for (const SampledMass& other : others_) {
    total += other.mass;
    if (other.mass > 0.0) smallest = std::min(smallest, other.least);
  }
  if (own.mass <= 0.0) return total > 0.0 ? 0.0 : 1.0;
  return std::pow(smallest / own.least, beta) * (static_cast<double>(others_.size() + 1) * own.mass / total);
}

void TrainingLoop::update(const Drawn& drawn) {
  replay_.update(drawn.indices.data(), priorities_.data(), drawn.generations.data(), drawn.batch.rows);
}

GrantedLoop::Progress TrainingLoop::run_iterations(std::int64_t iterations, double beta) {
  std::exception_ptr failure;
  const auto draw_next = [&](std::size_t) {
    try {
      Seconds elsewhere;  // the loop's thread counts what it waits
      Stopwatch watch(elsewhere, events_ahead_);
      update(drawn_[current_]);
      watch.lap(&Seconds::update);
      draw(drawn_[1 - current_], beta, watch);
    } catch (...) {
      failure = std::current_exception();
    }
  };
  const learner::PrioritiesKnown prefetching = [&] { pool_.offer(1, draw_next); }, alone;
  Progress done;
  Stopwatch watch(seconds_, events_);
  // A batch drawn ahead is trained even if the grants have been closed since: it was counted as sampled.
  for (bool drawn = false; drawn || wants_more(done.iterations, iterations); ++done.iterations) {
    if (!drawn) draw(drawn_[current_], beta, watch);
    drawn = prefetch_ && wants_more(done.iterations + 1, iterations);
    try {
      done.td_error += algorithm_.step(batch(), priorities_.data(), drawn ? prefetching : alone).td_error;
    } catch (...) {
      pool_.finish();
      throw;
    }
    watch.lap(&Seconds::train);
    if (drawn) {
      pool_.finish();
      if (!failure) current_ = 1 - current_;
      watch.lap(&Seconds::gather);
    } else {
      update(drawn_[current_]);
      watch.lap(&Seconds::update);
    }
    if (counts_to_publish()) {
      publish();
      watch.lap(&Seconds::publish);
    }
    if (failure) std::rethrow_exception(failure);  // where the loop itself would have drawn
  }
  return done;
}

}  // namespace pearl
