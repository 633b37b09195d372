#include "fpga_program.hpp"

#include <bit>
#include <sstream>

#include "pearl/errors.hpp"
#include "pearl/fpga_replay.hpp"

namespace pearl::device {
namespace {

constexpr std::int64_t kMostSlots = std::int64_t{1} << 20;
constexpr unsigned kMostLevels = 16;  // below the root; each is a kernel of its own

}  // namespace

const char* const kAutorunPreamble = R"(#ifdef PEARL_AHEAD_OF_TIME
#include <sycl/sycl.hpp>
#include <sycl/ext/intel/fpga_extensions.hpp>
#else
#include "pearl/device/sycl.hpp"
#endif

namespace experimental = sycl::ext::oneapi::experimental;
#ifdef PEARL_AHEAD_OF_TIME
#define PEARL_TASK inline void
#else
#define PEARL_TASK extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((experimental::single_task_kernel)) void
#endif

)";

TreeShape TreeShape::of(std::int64_t capacity, unsigned fanout) {
  if (capacity < 1 || capacity > kMostSlots)
    throw ReplayError("The capacity of a replay on an FPGA must lie in [1, 2**20]; found " + std::to_string(capacity) +
                      ".");
  if (fanout < 2 || fanout > 256 || !std::has_single_bit(fanout))
    throw ReplayError("Fanout must be a power of two from 2 to 256; found " + std::to_string(fanout) + ".");
  const auto shift = static_cast<unsigned>(std::countr_zero(fanout));
  unsigned depth = 1;
  while ((std::int64_t{1} << shift * depth) < capacity) ++depth;
  if (depth > kMostLevels)
    throw ReplayError("A replay on an FPGA has at most " + std::to_string(kMostLevels) +
                      " levels below its root; a capacity of " + std::to_string(capacity) + " and a fanout of " +
                      std::to_string(fanout) + " need " + std::to_string(depth) + ". Choose a larger fanout.");
  return {static_cast<std::uint32_t>(capacity), shift, depth};
}

std::vector<unsigned> TreeShape::bits() const {
  std::vector<unsigned> bits;
  for (unsigned level = 0; level <= depth; ++level) bits.push_back(fpga::kLeafBits + shift * (depth - level));
  return bits;
}

std::vector<std::uint32_t> TreeShape::nodes() const {
  std::vector<std::uint32_t> nodes;
  for (unsigned level = 0; level <= depth; ++level)
    nodes.push_back(fpga::tree_nodes(capacity, shift * (depth - level)));
  return nodes;
}

AutorunProgram replay_program(const TreeShape& shape, int pipe_items, const JoinedLearner& learner) {
  const std::string prefix = "pearl_replay_";
  AutorunProgram program{"replay", prefix, {}, {}, {prefix + "feed", prefix + "collect"}};
  std::ostringstream text;
  text << kAutorunPreamble << "#include \"pearl/fpga_replay.hpp\"\n"
       << learner.headers << "\nusing namespace pearl::fpga;\n\n"
       << "// " << shape.capacity << " slots, fanout " << (1u << shape.shift) << ". Bits of a node, the root's first:";
  for (const unsigned bits : shape.bits()) text << ' ' << bits;
  text << "\nusing Shape = Tree<" << shape.capacity << ", " << shape.shift << ", " << shape.depth << ">;\n"
       << "constexpr int kItems = " << pipe_items << ";  // that fit between two stages\n"
       << "struct Replay;\n"
       << "template <int level>\nusing Requests = Pipe<Replay, level, Request, kItems>;  // what reaches a level\n"
       << "using Changes = Pipe<Replay, " << shape.depth + 1 << ", Change, kItems>;\n"
       << "using Answers = Pipe<Replay, " << shape.depth + 2 << ", Answer, kItems>;\n\n";
  for (unsigned level = 0; level <= shape.depth; ++level) {
    program.stages.push_back(prefix + "level" + std::to_string(level));
    text << "PEARL_TASK " << program.stages.back() << "() { ";
    if (level == 0)
      text << "root_stage<Shape, kItems, Requests<0>, Changes, Requests<1>>";
    else if (level < shape.depth)
      text << "inner_stage<Shape, " << level << ", Requests<" << level << ">, Requests<" << level + 1 << ">>";
    else
      text << "leaf_stage<Shape, Requests<" << level << ">, Changes, Answers>";
    text << "(); }\n";
  }
  text << '\n' << learner.text << "PEARL_TASK " << program.bridges[kFeed]
       << "(const Command* command, const Item* items, LearnerContext* context) {\n"
       << "  feed<Requests<0>, " << learner.type << ">(*command, items, context);\n}\n"
       << "PEARL_TASK " << program.bridges[kCollect]
       << "(const Command* command, Held* held, float* weights, Summary* summary, const LearnerContext* context) {\n"
       << "  collect<Answers, " << learner.type << ">(*command, held, weights, summary, context);\n}\n";
  program.text = text.str();
  return program;
}

std::string ahead_of_time(const AutorunProgram& program) {
  std::ostringstream text;
  text << "#define PEARL_AHEAD_OF_TIME\n"
       << program.text << "\n// Declared here, kernels have these names in reports.\n";
  for (const std::string& stage : program.stages) text << "class " << stage << "_kernel;\n";
  for (const std::string& bridge : program.bridges) text << "class " << bridge << "_kernel;\n";
  text << "\n// A queue for each stage, in turn.\ntemplate <class Queues>\nvoid launch_stages(Queues& queues) {\n";
  for (std::size_t i = 0; i < program.stages.size(); ++i)
    text << "  queues[" << i << "].template single_task<" << program.stages[i] << "_kernel>([] { "
         << program.stages[i] << "(); });\n";
  text << "}\n\ninline constexpr int kStages = " << program.stages.size() << ";\n";
  return text.str();
}

}  // namespace pearl::device
