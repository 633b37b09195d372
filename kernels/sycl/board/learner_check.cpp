// Compares the Learner's pipeline on an FPGA with plain C++: two training steps, of a full batch and of a smaller one.
#include "program.hpp"  // generated

#include "learner_host.hpp"

int main() {
  Board board(kStages);
  LearnerHost learner(board, design::kRows);
  sycl::queue submitting = board.queue(), resolving = board.queue();
  LearnerContext* const context = learner.context;
  const auto submit = [&] {
    return submitting.single_task<pearl_learner_submit_kernel>([=] { pearl_learner_submit(context); });
  };
  Verdict verdict;
  for (const std::uint32_t rows : {design::kRows, (design::kRows + 1) / 2}) {
    learner.prepare(rows);
    submit();
    resolving.single_task<pearl_learner_resolve_kernel>([=] { pearl_learner_resolve(context); }).wait();
    submitting.wait();
    std::vector<std::uint32_t> places;
    for (std::uint32_t row = 0; row < rows; ++row) places.push_back(row);
    learner.compare(places, {learner.importance, learner.importance + rows}, verdict);
  }
  context->batch = 0;  // stop
  submit().wait();
  board.join();
  return verdict.say();
}
