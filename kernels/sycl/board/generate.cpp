// Writes the Replay Manager's program for a board: generate CAPACITY FANOUT PIPE_ITEMS > replay.hpp
#include <cstdlib>
#include <iostream>

#include "fpga_program.hpp"
#include "pearl/errors.hpp"

int main(int count, char** words) {
  if (count != 4) {
    std::cerr << "usage: generate CAPACITY FANOUT PIPE_ITEMS\n";
    return 2;
  }
  try {
    const auto shape = pearl::device::TreeShape::of(std::atoll(words[1]), static_cast<unsigned>(std::atoi(words[2])));
    std::cout << pearl::device::ahead_of_time(pearl::device::replay_program(shape, std::atoi(words[3])));
  } catch (const pearl::Error& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
