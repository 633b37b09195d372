// The Learner as a pipeline on an FPGA (PEARL Sec. V-B, Fig. 7; CF'22 Sec. 3.2). Each layer has the stages FP, BP, GA and
// WU, and each loss a stage LOSS. Pipes join the stages; the items of a batch stream through them one after another.
//
//   items -> FP 1 -> FP 2 -> ... -> LOSS -> BP L -> ... -> BP 2
//               \       \              \-> GA L   \-> ... -> GA 1
//                \-> GA 2, BP 2 (activations)          GA l of every copy -> WU l -> FP l, BP l of every copy
//
// A batch is split over DP copies of the pipeline, item by item. WU l adds up their gradients, moves the weights and
// targets, which are in device memory, and streams them to the copies before the next batch: no stage reads weights while
// they are written (CF'22 Sec. 3.2.2). Activations wait in pipes that hold a whole sub-batch. Actor and critic train at
// the same time: the actor sees the critic's weights from before this batch, the lagged critic (Sec. 3.2.4).
#pragma once

#include <cstdint>
#include <type_traits>

#include "pearl/fpga_pipes.hpp"
#include "pearl/tape.hpp"

namespace pearl::fpga {

inline constexpr int kBlock = 16;  // values per item of a pipe
inline constexpr int kMoved = 4;   // weights that a WU moves at once

constexpr int padded(int width) { return (width + kBlock - 1) / kBlock * kBlock; }

struct Block {
  float values[kBlock];
};

// Passes through all stages ahead of every batch.
struct Order {
  // Volatile: the host changes it between batches, while a stage's kernel never ends, so a compiler could cache it.
  const volatile LearnerContext* context;
  std::uint32_t items;  // of this copy of the pipeline
  std::uint32_t stops;
};

// The inputs of LOSS for an item, in addition to the networks' outputs.
struct Detail {
  float reward, discount;
  std::int32_t action;  // DQN
  std::uint32_t slot, generation;
};

struct Result {
  float priority, loss;
  std::uint32_t slot, generation;
};

enum Trained : int { kCritic = 0, kPolicy = 1, kTemperature = 2 };  // DQN's network counts as a critic

// The arguments of a training step, in device memory; the host fills them.
struct LearnerContext {
  const void* columns[5];  // obs, action, reward, next_obs, discount
  const float* importance;
  float* priorities;
  float* vectors[4];  // tape::Vector
  float* log_alpha;   // SAC's: one stage moves it; the others read `temperature`, from before this batch
  tape::Optimizer optimizers[3];
  tape::StepArguments steps[3];
  const float* scales;  // centers and half ranges: of observations, then of actions
  std::uint64_t step, noise_seed;
  std::uint32_t batch;
  std::uint32_t moves_policy;
  float max_grad_norm, saturation_penalty, target_noise, noise_clip;
  float temperature, target_entropy, log_std_low, log_std_high;
  // Results.
  float norms[2];
  float loss, td_error;  // sums
  std::uint32_t unfit;   // setting 2: the priorities exceed the Replay Manager's scale and were not written
};

// A layer's offsets in its network's vector: matrix (out, in) and biases (below 0: none).
template <int inputs, int outputs, std::int64_t weight, std::int64_t bias, tape::Activation activation>
struct Layer {
  static constexpr int kIn = inputs, kOut = outputs;
  static constexpr std::int64_t kWeight = weight, kBias = bias;
  static constexpr tape::Activation kActivation = activation;
};

#if defined(__SYCL_DEVICE_ONLY__) || defined(PEARL_AHEAD_OF_TIME)

}  // namespace pearl::fpga

#include "pearl/device/learner_math.hpp"

namespace pearl::fpga {

inline Block block_of(const float* values) {
  Block block;
#pragma unroll
  for (int k = 0; k < kBlock; ++k) block.values[k] = values[k];
  return block;
}

inline void unpack(const Block& block, float* values) {
#pragma unroll
  for (int k = 0; k < kBlock; ++k) values[k] = block.values[k];
}

// A pipe for `items` vectors of `width` values, and one for the orders ahead of them.
template <class Program, int at, int width, int items>
struct Wire {
  static constexpr int kPadded = padded(width);
  using Values = Pipe<Program, 2 * at, Block, items * kPadded / kBlock>;
  using Orders = Pipe<Program, 2 * at + 1, Order, 4>;

  static void read(float* values) {
    for (int first = 0; first < kPadded; first += kBlock) unpack(Values::read(), values + first);
  }
  static void write(const float* values) {
    for (int first = 0; first < kPadded; first += kBlock) Values::write(block_of(values + first));
  }
};

// Wires that get the same values from a stage. Those of `Leads` also get its orders, those of `Sides` only values.
template <class... Wires>
struct Leads {
  static void order(const Order& order) { (Wires::Orders::write(order), ...); }
  static void write(const float* values) { (Wires::write(values), ...); }
};
template <class... Wires>
struct Sides {
  static void order(const Order&) {}
  static void write(const float* values) { (Wires::write(values), ...); }
};

// Pipes of blocks, for weights and gradients.
template <class... Pipes>
struct Blocks {
  static void write(const Block& block) { (Pipes::write(block), ...); }
  // The sum of a block of each; there is at least one.
  static Block sum() {
    Block total{};
    const auto add = [&total](const Block& block) {
#pragma unroll
      for (int k = 0; k < kBlock; ++k) total.values[k] += block.values[k];
    };
    (add(Pipes::read()), ...);
    return total;
  }
};

// A copy of a layer's weights: rows padded to blocks, then the biases.
template <class Shape>
struct Weights {
  static constexpr int kRow = padded(Shape::kIn), kBiases = padded(Shape::kOut);
  float matrix[Shape::kOut * kRow];
  float biases[kBiases];

  template <class From>
  void read() {
    for (int first = 0; first < Shape::kOut * kRow; first += kBlock) unpack(From::read(), matrix + first);
    for (int first = 0; first < kBiases; first += kBlock) unpack(From::read(), biases + first);
  }
};

// One dot product: `lanes` multipliers and a tree of adders.
template <int width, int lanes>
float dot(const float* a, const float* b) {
  float sums[lanes] = {};
  for (int first = 0; first < width; first += lanes) {
#pragma unroll
    for (int k = 0; k < lanes; ++k) sums[k] += a[first + k] * b[first + k];
  }
#pragma unroll
  for (int half = lanes / 2; half > 0; half /= 2) {
#pragma unroll
    for (int k = 0; k < half; ++k) sums[k] += sums[k + half];
  }
  return sums[0];
}

constexpr int lanes_of(int unroll) { return unroll < kBlock ? unroll : kBlock; }
constexpr int rows_of(int unroll) { return unroll < kBlock ? 1 : unroll / kBlock; }

// The loop of a stage: passes every order on to `Lead`, then calls begin(order) once and each(order, item) for each item
// of the batch; returns when told to stop.
template <class In, class Lead, class Begin, class Each>
void for_batches(const Begin& begin, const Each& each) {
  while (true) {
    const Order order = In::Orders::read();
    Lead::order(order);
    if (order.stops) return;
    begin(order);
    for (std::uint32_t item = 0; item < order.items; ++item) each(order, item);
  }
}

// FP of one layer, with `unroll` multiply-accumulates in parallel: UF of PEARL Sec. V-B.
template <class Shape, int unroll, class In, class From, class Lead, class Side>
void forward_stage() {
  constexpr int kRow = padded(Shape::kIn);
  Weights<Shape> weights;
  const auto begin = [&](const Order&) { weights.template read<From>(); };
  for_batches<In, Lead>(begin, [&](const Order&, std::uint32_t) {
    float x[kRow], y[padded(Shape::kOut)] = {};
    In::read(x);
#pragma unroll rows_of(unroll)
    for (int row = 0; row < Shape::kOut; ++row) {
      const float sum = weights.biases[row] + dot<kRow, lanes_of(unroll)>(weights.matrix + row * kRow, x);
      y[row] = tape::activated(sum, Shape::kActivation);
    }
    Lead::write(y);
    Side::write(y);
  });
}

// The derivative of an activation, from its result.
inline float derivative(float result, tape::Activation activation) {
  return activation == tape::Activation::relu    ? (result > 0.0f ? 1.0f : 0.0f)
         : activation == tape::Activation::tanh ? 1.0f - result * result
                                                : 1.0f;
}

// BP of one layer: slopes of its outputs to slopes of the pre-activations of the layer below.
template <class Shape, tape::Activation below, int unroll, class In, class Results, class From, class Lead>
void backward_stage() {
  constexpr int kRow = padded(Shape::kIn), kLanes = lanes_of(unroll);
  Weights<Shape> weights;
  const auto begin = [&](const Order&) { weights.template read<From>(); };
  for_batches<In, Lead>(begin, [&](const Order&, std::uint32_t) {
    float slopes[padded(Shape::kOut)], out[kRow] = {};
    In::read(slopes);
#pragma unroll rows_of(unroll)
    for (int row = 0; row < Shape::kOut; ++row) {
      for (int first = 0; first < kRow; first += kLanes) {
#pragma unroll
        for (int k = 0; k < kLanes; ++k) out[first + k] += slopes[row] * weights.matrix[row * kRow + first + k];
      }
    }
    if constexpr (below != tape::Activation::none) {
      float results[kRow];
      Results::read(results);
#pragma unroll kLanes
      for (int k = 0; k < kRow; ++k) out[k] *= derivative(results[k], below);
    }
    Lead::write(out);
  });
}

// GA of one layer: adds up the sub-batch's gradients in its scratchpad, then sends them to WU. A layer without biases
// sends zeros instead, since WU sums the squares of everything it gets.
template <class Shape, int unroll, class In, class Inputs, class Out>
void gradient_stage() {
  constexpr int kRow = padded(Shape::kIn), kLanes = lanes_of(unroll), kBiases = padded(Shape::kOut);
  float matrix[Shape::kOut * kRow], biases[kBiases];
  while (true) {
    const Order order = In::Orders::read();
    if (order.stops) return;
    for (int first = 0; first < Shape::kOut * kRow; first += kBlock) unpack(Block{}, matrix + first);
    for (int first = 0; first < kBiases; first += kBlock) unpack(Block{}, biases + first);
    for (std::uint32_t item = 0; item < order.items; ++item) {
      float slopes[kBiases], x[kRow];
      In::read(slopes);
      Inputs::read(x);
#pragma unroll rows_of(unroll)
      for (int row = 0; row < Shape::kOut; ++row) {
        for (int first = 0; first < kRow; first += kLanes) {
#pragma unroll
          for (int k = 0; k < kLanes; ++k) matrix[row * kRow + first + k] += slopes[row] * x[first + k];
        }
        if constexpr (Shape::kBias >= 0) biases[row] += slopes[row];
      }
    }
    for (int first = 0; first < Shape::kOut * kRow; first += kBlock) Out::write(block_of(matrix + first));
    for (int first = 0; first < kBiases; first += kBlock) Out::write(block_of(biases + first));
  }
}

// Sends a layer's weights from a vector in the order in which `Weights` reads them.
template <class Shape, class To>
void stream_weights(const float* vector) {
  constexpr int kRow = padded(Shape::kIn);
  for (int row = 0; row < Shape::kOut; ++row) {
    for (int first = 0; first < kRow; first += kBlock) {
      Block block;
#pragma unroll
      for (int k = 0; k < kBlock; ++k) {
        const int at = first + k;
        block.values[k] = at < Shape::kIn ? vector[Shape::kWeight + std::int64_t{row} * Shape::kIn + at] : 0.0f;
      }
      To::write(block);
    }
  }
  for (int first = 0; first < padded(Shape::kOut); first += kBlock) {
    Block block;
#pragma unroll
    for (int k = 0; k < kBlock; ++k) {
      const int at = first + k;
      block.values[k] = Shape::kBias >= 0 && at < Shape::kOut ? vector[Shape::kBias + at] : 0.0f;
    }
    To::write(block);
  }
}

// Orders stores before the pipe write that announces them; a pipe by itself does not order memory accesses.
inline void publish_stores() {
#if defined(PEARL_AHEAD_OF_TIME)
  sycl::atomic_fence(sycl::memory_order::release, sycl::memory_scope::system);
#else  // the widest scope of the emulator, whose device is the host
  sycl::atomic_fence(sycl::memory_order::release, sycl::memory_scope::device);
#endif
}

// For stages that store to device memory, which keeps compilers from caching reads across batches.
inline const LearnerContext& whole(const Order& order) { return *const_cast<const LearnerContext*>(order.context); }

// WU of one layer: sends all copies their weights (`Online`, `Target`), gets their gradients (`Gradients`), moves the
// weights and synchronises the target (CF'22 Sec. 3.2.4). The WUs of a network sum the squares of the gradient in a
// chain, `Before` to `After`; the last one sends the total to the others (`Told`) so that all clip alike.
template <class Shape, int network, int rule, class Orders, class Online, class Target, class Gradients, class Before,
          class After, class Told, class Tell, class Done>
void weight_stage() {
  constexpr bool kHasTargets = !std::is_same_v<Target, None>;
  constexpr int kVector = network == kCritic ? tape::kOnline : tape::kActor;
  constexpr int kTargets = network == kCritic ? tape::kTarget : tape::kTargetActor;
  constexpr int kRow = padded(Shape::kIn), kBiases = padded(Shape::kOut), kMatrix = Shape::kOut * kRow;
  float gradient[kMatrix + kBiases];
  while (true) {
    const Order order = Orders::read();
    if (order.stops) return;
    const LearnerContext& context = whole(order);
    float* online = context.vectors[kVector];
    float* targets = context.vectors[kTargets];
    stream_weights<Shape, Online>(online);
    if constexpr (kHasTargets) stream_weights<Shape, Target>(targets);
    float squares = 0.0f;
    for (int first = 0; first < kMatrix + kBiases; first += kBlock) {
      const Block block = Gradients::sum();
#pragma unroll
      for (int k = 0; k < kBlock; ++k) {
        gradient[first + k] = block.values[k];
        squares += block.values[k] * block.values[k];
      }
    }
    if constexpr (!std::is_same_v<Before, None>) squares += Before::read();
    if constexpr (!std::is_same_v<After, None>) {
      After::write(squares);
      squares = Told::read();
    } else {
      Tell::write(squares);
    }
    const float norm = sycl::sqrt(squares);
    if (tape::finite(norm) && (network == kCritic || context.moves_policy != 0)) {
      const float limit = context.max_grad_norm;
      const float factor = limit > 0.0f && norm + 1e-6f > limit ? limit / (norm + 1e-6f) : 1.0f;
      const tape::WeightMover<rule, kHasTargets> move{context.optimizers[network], online, targets,
                                                      context.steps[network], factor};
      for (int row = 0; row < Shape::kOut; ++row) {
#pragma unroll kMoved
        for (int at = 0; at < Shape::kIn; ++at)
          move(Shape::kWeight + std::int64_t{row} * Shape::kIn + at, gradient[row * kRow + at]);
      }
      if constexpr (Shape::kBias >= 0) {
#pragma unroll kMoved
        for (int at = 0; at < Shape::kOut; ++at) move(Shape::kBias + at, gradient[kMatrix + at]);
      }
    }
    publish_stores();
    Done::write(norm);
  }
}

template <class... Pipes>
struct Everyone {
  static void write(float value) { (Pipes::write(value), ...); }
};

// --- LOSS ------------------------------------------------------------------------------------------------------------

inline int best_of(const float* values, int count) {
  int best = 0;
  for (int k = 1; k < count; ++k)
    if (values[k] > values[best] || (values[k] != values[k] && values[best] == values[best])) best = k;
  return best;
}

// DQN's: Huber loss; double DQN if there is a `Chooser`. An action out of range makes the slope NaN, so that no weight
// moves.
template <int actions, class In, class Target, class Chooser, class Details, class Importance, class Lead, class Out>
void dqn_loss_stage() {
  float batch = 0.0f;
  const auto begin = [&](const Order& order) { batch = static_cast<float>(order.context->batch); };
  for_batches<In, Lead>(begin, [&](const Order&, std::uint32_t) {
    float values[padded(actions)], next[padded(actions)], chooser[padded(actions)], slopes[padded(actions)] = {};
    In::read(values);
    Target::read(next);
    int best;
    if constexpr (std::is_same_v<Chooser, None>) {
      best = best_of(next, actions);
    } else {
      Chooser::read(chooser);
      best = best_of(chooser, actions);
    }
    const Detail detail = Details::read();
    const float weight = Importance::read(), share = weight / batch;
    const bool known = detail.action >= 0 && detail.action < actions;
    const int action = known ? detail.action : 0;
    float error = values[action] - (detail.reward + detail.discount * next[best]);
    if (!known) error = error - error + __builtin_nanf("");
    const float distance = sycl::fabs(error);
    const bool near = distance < 1.0f;
    // A NaN is not near, and stays a NaN.
    slopes[action] = near ? error * share : error > 0.0f ? share : error < 0.0f ? -share : error;
    Lead::write(slopes);
    Out::write(Result{distance, weight * (near ? 0.5f * error * error : distance - 0.5f), detail.slot,
                      detail.generation});
  });
}

// The first value of an item.
template <class From>
float read_scalar() {
  float values[kBlock];
  From::read(values);
  return values[0];
}

template <class To>
void write_scalar(float value) {
  float values[kBlock] = {value};
  To::write(values);
}

// Wires that a stage reads together; the first brings the orders. Scalars reads a scalar of each, ...
template <class First, class... Others>
struct Scalars {
  static constexpr int kCount = 1 + sizeof...(Others);
  using Orders = typename First::Orders;

  static void read(float* to) {
    *to = read_scalar<First>();
    ((*++to = read_scalar<Others>()), ...);
  }
};

// ... Sum the sum of their vectors.
template <class First, class... Others>
struct Sum {
  using Orders = typename First::Orders;

  static void read(float* to) {
    First::read(to);
    (add<Others>(to), ...);
  }

 private:
  template <class Other>
  static void add(float* to) {
    float values[Other::kPadded];
    Other::read(values);
#pragma unroll kBlock
    for (int k = 0; k < Other::kPadded; ++k) to[k] += values[k];
  }
};

// Writes a scalar to each of these leads.
template <class... To>
struct ScalarLeads {
  static void order(const Order& order) { (To::order(order), ...); }
  static void write(const float* values) { (write_scalar<To>(*values++), ...); }
};

// NaN if one of them is.
template <int count>
float smallest(const float* values) {
  float found = values[0];
#pragma unroll
  for (int k = 1; k < count; ++k)
    if (values[k] < found || values[k] != values[k]) found = values[k];
  return found;
}

// The critics': squared errors against the smaller of the targets; SAC subtracts temperature * log density of the action.
template <class In, class Target, class Densities, class Details, class Importance, class Lead, class Out>
void critic_loss_stage() {
  constexpr int kCritics = In::kCount;
  float batch = 0.0f, temperature = 0.0f;
  const auto begin = [&](const Order& order) {
    batch = static_cast<float>(order.context->batch);
    temperature = order.context->temperature;
  };
  for_batches<In, Lead>(begin, [&](const Order&, std::uint32_t) {
    float values[kCritics], next[kCritics], slopes[kCritics];
    In::read(values);
    Target::read(next);
    float next_value = smallest<kCritics>(next);
    if constexpr (!std::is_same_v<Densities, None>) next_value -= temperature * Densities::read();
    const Detail detail = Details::read();
    const float target = detail.reward + detail.discount * next_value, weight = Importance::read();
    float largest = 0.0f, loss = 0.0f;
#pragma unroll
    for (int k = 0; k < kCritics; ++k) {
      const float error = values[k] - target, distance = sycl::fabs(error);
      slopes[k] = 2.0f * error * (weight / batch);
      loss += weight * error * error;
      largest = distance > largest || distance != distance ? distance : largest;
    }
    Lead::write(slopes);
    Out::write(Result{largest, loss, detail.slot, detail.generation});
  });
}

// A Choice turns a policy's outputs (`said`) for one item into unit actions, one by one (`act`), and slopes of these into
// slopes of the outputs (`slopes`). DDPG's: tanh, with a penalty where it saturates.
template <int actions>
struct Greedy {
  static constexpr int kSaid = actions;

  static float act(const volatile LearnerContext&, std::uint32_t, const float* said, int k, float&) {
    return sycl::tanh(said[k]);
  }

  static void slopes(const volatile LearnerContext& context, std::uint32_t, const float* said, int k, float slope,
                     float* out) {
    const float penalty = 2.0f * context.saturation_penalty / static_cast<float>(context.batch);
    const float unit = sycl::tanh(said[k]);
    const float above = sycl::fmax(sycl::fabs(said[k]) - tape::kLinearRange, 0.0f);
    out[k] = slope * (1.0f - unit * unit) + penalty * (said[k] > 0.0f ? above : -above);
  }
};

// A number of draw `draw` of the batch's noise, by the item's row; copies take the rows in turn.
template <int actions, int draw, int copy, int copies>
float noise_at(const volatile LearnerContext& context, std::uint32_t item, int k) {
  const std::uint64_t row = copy + std::uint64_t{item} * copies;
  return tape::normal_at(context.noise_seed, context.step, draw, row * actions + k);
}

// TD3's target policy.
template <int actions, int copy, int copies>
struct Disturbed {
  static constexpr int kSaid = actions;

  static float act(const volatile LearnerContext& context, std::uint32_t item, const float* said, int k, float&) {
    const float unit = sycl::tanh(said[k]);
    if (!(context.target_noise > 0.0f)) return unit;
    const float noise = context.target_noise * noise_at<actions, 0, copy, copies>(context, item, k);
    const float clip = context.noise_clip;
    return sycl::clamp(unit + sycl::clamp(noise, -clip, clip), -1.0f, 1.0f);
  }
};

// SAC's: tanh of normal numbers; the policy's outputs are means, then log deviations.
template <int actions, int draw, int copy, int copies>
struct Sampled {
  static constexpr int kSaid = 2 * actions;

  struct Number {
    float noise, log_std, deviation, unsquashed;
    bool clamped;
  };
  static Number number(const volatile LearnerContext& context, std::uint32_t item, const float* said, int k) {
    const float raw = said[actions + k];
    const bool low = raw < context.log_std_low, high = raw > context.log_std_high;
    const float log_std = low ? context.log_std_low : high ? context.log_std_high : raw;  // a NaN stays a NaN
    const float noise = noise_at<actions, draw, copy, copies>(context, item, k), deviation = sycl::exp(log_std) * noise;
    return {noise, log_std, deviation, said[k] + deviation, low || high};
  }

  static float act(const volatile LearnerContext& context, std::uint32_t item, const float* said, int k,
                   float& log_density) {
    const Number drawn = number(context, item, said, k);
    const float x = drawn.unsquashed;
    log_density -= 0.5f * drawn.noise * drawn.noise + drawn.log_std + tape::kHalfLog2Pi +
                   2.0f * (tape::kLog2 - x - tape::softplus(-2.0f * x));
    return sycl::tanh(x);
  }

  static void slopes(const volatile LearnerContext& context, std::uint32_t item, const float* said, int k, float slope,
                     float* out) {
    const Number drawn = number(context, item, said, k);
    const float unit = sycl::tanh(drawn.unsquashed);
    // The log density falls by log(1 - tanh^2), whose slope is -2 tanh, and by log_std.
    const float density = context.temperature / static_cast<float>(context.batch);
    out[k] = slope * (1.0f - unit * unit) + 2.0f * density * unit;
    out[actions + k] = drawn.clamped ? 0.0f : out[k] * drawn.deviation - density;
  }
};

// The critics' input: an observation and the policy's action for it, both in unit scale. `Densities` gets the action's
// log density.
template <int observations, int actions, class Choice, class In, class Observations, class Lead, class Densities>
void act_stage() {
  const auto begin = [](const Order&) {};
  for_batches<In, Lead>(begin, [&](const Order& order, std::uint32_t item) {
    float said[padded(Choice::kSaid)], seen[padded(observations)], out[padded(observations + actions)] = {};
    float log_density = 0.0f;
    In::read(said);
    Observations::read(seen);
    for (int k = 0; k < observations; ++k) out[k] = seen[k];
    for (int k = 0; k < actions; ++k)
      out[observations + k] = Choice::act(*order.context, item, said, k, log_density);
    Lead::write(out);
    if constexpr (!std::is_same_v<Densities, None>) Densities::write(log_density);
  });
}

// LOSS of the policy, first half: raises its action's value, the smaller critic's; equal critics share the slope.
template <class In, class Lead>
void value_loss_stage() {
  constexpr int kCritics = In::kCount;
  float batch = 0.0f;
  const auto begin = [&](const Order& order) { batch = static_cast<float>(order.context->batch); };
  for_batches<In, Lead>(begin, [&](const Order&, std::uint32_t) {
    float values[kCritics], slopes[kCritics], sharing = 0.0f;
    In::read(values);
    const float value = smallest<kCritics>(values), wrong = value == value ? 0.0f : value;
#pragma unroll
    for (int k = 0; k < kCritics; ++k) sharing += values[k] == value ? 1.0f : 0.0f;
#pragma unroll
    for (int k = 0; k < kCritics; ++k) slopes[k] = values[k] == value ? -1.0f / (batch * sharing) : wrong;
    Lead::write(slopes);
  });
}

// LOSS of the policy, second half: slopes of the critics' input to slopes of the policy's outputs.
template <int observations, int actions, class Choice, class In, class Said, class Lead>
void policy_loss_stage() {
  const auto begin = [](const Order&) {};
  for_batches<In, Lead>(begin, [&](const Order& order, std::uint32_t item) {
    float slopes[padded(observations + actions)], said[padded(Choice::kSaid)], out[padded(Choice::kSaid)] = {};
    In::read(slopes);
    Said::read(said);
    for (int k = 0; k < actions; ++k)
      Choice::slopes(*order.context, item, said, k, slopes[observations + k], out);
    Lead::write(out);
  });
}

// WU of SAC's temperature, from the log densities of the batch's actions. It moves only when the policy does: `Told`
// brings the sum of squares of the policy's gradient.
template <int rule, class Orders, class Densities, class Told, class Done>
void temperature_stage() {
  while (true) {
    const Order order = Orders::read();
    if (order.stops) return;
    const LearnerContext& context = whole(order);
    float excess = 0.0f;
    const std::uint32_t rows = context.moves_policy != 0 ? context.batch : 0;
    for (std::uint32_t row = 0; row < rows; ++row) excess += Densities::read(row) + context.target_entropy;
    const float gradient = -excess / static_cast<float>(context.batch), norm = sycl::sqrt(Told::read());
    if (tape::finite(norm) && tape::finite(gradient) && rows != 0) {
      const tape::WeightMover<rule, false> move{context.optimizers[kTemperature], context.log_alpha, nullptr,
                                                context.steps[kTemperature], 1.0f};
      move(0, gradient);
    }
    publish_stores();
    Done::write(tape::finite(gradient) ? norm : gradient);
  }
}

// --- Items -----------------------------------------------------------------------------------------------------------

// Values of a row in unit scale. `scale`: the centers, then the half ranges.
template <int width>
void load_scaled(const float* row, const float* scale, float* to) {
  for (int k = 0; k < width; ++k) to[k] = (row[k] - scale[k]) / scale[width + k];
}

// Sends items into one copy of DQN's pipeline. Seen* and Next are wires of observations; SeenLead and Next also get
// orders.
template <int observations, class SeenLead, class SeenSide, class Next, class DetailPipe, class Importance>
struct DqnItems {
  static void order(const Order& order) {
    SeenLead::order(order);
    Next::order(order);
  }
  static void send(const LearnerContext& context, std::uint64_t from, const Detail& place) {
    float values[padded(observations)] = {};
    const auto* seen = static_cast<const float*>(context.columns[0]) + from * observations;
    for (int k = 0; k < observations; ++k) values[k] = seen[k];
    SeenLead::write(values);
    SeenSide::write(values);
    const auto* next = static_cast<const float*>(context.columns[3]) + from * observations;
    for (int k = 0; k < observations; ++k) values[k] = next[k];
    Next::write(values);
    Detail detail = place;
    const std::int64_t action = static_cast<const std::int64_t*>(context.columns[1])[from];
    detail.action = action >= 0 && action < (1 << 30) ? static_cast<std::int32_t>(action) : -1;
    detail.reward = static_cast<const float*>(context.columns[2])[from];
    detail.discount = static_cast<const float*>(context.columns[4])[from];
    DetailPipe::write(detail);
  }
  static void weigh(float importance) { Importance::write(importance); }
};

// The same for an actor and its critics: Critic* wires get observation and action, Policy* the observation, Next* the
// next observation, for the target policy.
template <int observations, int actions, class CriticLead, class CriticSide, class PolicyLead, class PolicySide,
          class NextLead, class NextSide, class DetailPipe, class Importance>
struct ActorCriticItems {
  static void order(const Order& order) {
    CriticLead::order(order);
    NextLead::order(order);
    Order policy = order;
    if (!order.stops && order.context->moves_policy == 0) policy.items = 0;
    PolicyLead::order(policy);
  }
  static void send(const LearnerContext& context, std::uint64_t from, const Detail& place) {
    float values[padded(observations + actions)] = {};
    const float* scales = context.scales;
    load_scaled<observations>(static_cast<const float*>(context.columns[0]) + from * observations, scales, values);
    if (context.moves_policy != 0) {
      float seen[padded(observations)] = {};
      for (int k = 0; k < observations; ++k) seen[k] = values[k];
      PolicyLead::write(seen);
      PolicySide::write(seen);
    }
    load_scaled<actions>(static_cast<const float*>(context.columns[1]) + from * actions, scales + 2 * observations,
                         values + observations);
    CriticLead::write(values);
    CriticSide::write(values);
    float next[padded(observations)] = {};
    load_scaled<observations>(static_cast<const float*>(context.columns[3]) + from * observations, scales, next);
    NextLead::write(next);
    NextSide::write(next);
    Detail detail = place;
    detail.reward = static_cast<const float*>(context.columns[2])[from];
    detail.discount = static_cast<const float*>(context.columns[4])[from];
    DetailPipe::write(detail);
  }
  static void weigh(float importance) { Importance::write(importance); }
};

// All copies of a pipeline: row r of a batch goes to copy r modulo their count.
template <class... Pipes>
struct WeightOrders {
  static void write(const Order& order) { (Pipes::write(order), ...); }
};

template <class ToWeights, class... Copies>
struct Learners {
  static constexpr std::uint32_t kCopies = sizeof...(Copies);

  static void begin(const LearnerContext* context) {
    ToWeights::write(Order{context, 0, 0});
    std::uint32_t copy = 0;
    (Copies::order(Order{context, (context->batch + kCopies - 1 - copy++) / kCopies, 0}), ...);
  }
  // Sends row `row` of the batch, which is row `from` of the context's columns.
  static void send(const LearnerContext* context, std::uint64_t row, std::uint64_t from, const Detail& place) {
    std::uint32_t copy = 0;
    ((row % kCopies == copy++ ? Copies::send(*context, from, place) : void()), ...);
  }
  static void weigh(std::uint64_t row, float importance) {
    std::uint32_t copy = 0;
    ((row % kCopies == copy++ ? Copies::weigh(importance) : void()), ...);
  }
  static void stop() {
    const Order order{nullptr, 0, 1};
    ToWeights::write(order);
    (Copies::order(order), ...);
  }
};

// Results of the copies, in the order of the batch's rows.
template <class First, class... Others>
struct Results {
  static auto read(std::uint64_t row) {
    const std::uint64_t from = row % (1 + sizeof...(Others));
    decltype(First::read()) result{};
    std::uint32_t copy = 0;
    if (from == copy++) result = First::read();
    ((from == copy++ ? void(result = Others::read()) : void()), ...);
    return result;
  }
};

// Setting 1: sends a batch that is in memory shared by host and device.
template <class Pipelines>
void submit(const LearnerContext* context) {
  if (context->batch == 0) return Pipelines::stop();
  Pipelines::begin(context);
  for (std::uint32_t row = 0; row < context->batch; ++row) {
    Pipelines::send(context, row, row, Detail{});
    Pipelines::weigh(row, context->importance[row]);
  }
}

// Collects the priorities of a batch.
template <class Answers>
void resolve(LearnerContext* context) {
  float loss = 0.0f, td_error = 0.0f;
  for (std::uint32_t row = 0; row < context->batch; ++row) {
    const Result result = Answers::read(row);
    context->priorities[row] = result.priority;
    loss += result.loss;
    td_error += result.priority;
  }
  context->loss = loss;
  context->td_error = td_error;
}

// Waits until all weights have moved. `Done` of each layer brings its network's gradient norm.
template <class... Done>
struct Layers {
  static float wait() {
    float norm = 0.0f;
    ((norm = Done::read()), ...);
    return norm;
  }
};
template <class Critic, class Policy>
void finish(LearnerContext* context) {
  context->norms[kCritic] = Critic::wait();
  if constexpr (!std::is_same_v<Policy, None>) context->norms[kPolicy] = Policy::wait();
}

#endif

}  // namespace pearl::fpga
