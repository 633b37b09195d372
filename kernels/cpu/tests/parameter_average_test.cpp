#include "pearl/parameter_average.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "pearl/aligned.hpp"
#include "pearl/errors.hpp"
#include "pearl/snapshot.hpp"

namespace {

using namespace pearl;
using Vector = std::vector<float>;

// Odd counts leave part of a vector or of a piece over.
const std::vector<std::size_t> kCounts = {1, 2, 3, 7, 8, 9, 1023, 1024, 1025, 5000};

// Numbers of very different sizes, so that the order of additions shows.
Vector random_vector(std::size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Vector found(count);
  for (float& number : found) number = std::ldexp(normal(random), static_cast<int>(random() % 60) - 30);
  return found;
}

std::vector<const float*> pointers(const std::vector<Vector>& vectors) {
  std::vector<const float*> found;
  for (const Vector& vector : vectors) found.push_back(vector.data());
  return found;
}

void means_are_added_in_order_and_rounded_once() {
  std::mt19937 random(1);
  for (const std::size_t count : kCounts)
    for (const std::size_t learners : {1, 2, 3, 4, 5, 8}) {
      std::vector<Vector> vectors;
      for (std::size_t i = 0; i < learners; ++i) vectors.push_back(random_vector(count, random));
      Vector out(count + 1, 77.0f);
      mean_of(pointers(vectors), count, out.data());
      for (std::size_t i = 0; i < count; ++i) {
        double sum = vectors[0][i];
        for (std::size_t learner = 1; learner < learners; ++learner) sum += vectors[learner][i];
        CHECK(out[i] == static_cast<float>(sum / static_cast<double>(learners)));
      }
      CHECK(out[count] == 77.0f);
      mean_of(std::vector<const float*>(learners, vectors[0].data()), count, out.data());
      CHECK(std::equal(vectors[0].begin(), vectors[0].end(), out.begin()));
    }
  CHECK(throws<Error>([] { mean_of({}, 3, nullptr); }));
}

void arrays_are_one_vector() {
  std::mt19937 random(2);
  Vector first = random_vector(5, random), second = random_vector(1030, random), third = random_vector(1, random);
  const ParameterArrays arrays({{first.data(), 5, false}, {second.data(), 1030, true}, {third.data(), 1, false}});
  CHECK(arrays.count() == 1036);
  Vector vector(1036);
  arrays.gather(vector.data());
  CHECK(std::equal(first.begin(), first.end(), vector.begin()));
  CHECK(std::equal(second.begin(), second.end(), vector.begin() + 5));
  CHECK(vector[1035] == third[0]);
  const Vector others = random_vector(1036, random);
  arrays.scatter(others.data());
  arrays.gather(vector.data());
  CHECK(vector == others);
}

void late_averages_change_what_was_trained_since() {
  std::mt19937 random(3);
  for (const std::size_t count : kCounts) {
    const Vector average = random_vector(count, random), handed_in = random_vector(count, random);
    const Vector begun = random_vector(count, random);
    Vector trained = begun, statistic = begun, same = handed_in, settled = begun;
    ParameterArrays({{trained.data(), count, false}}).correct(average.data(), handed_in.data());
    ParameterArrays({{statistic.data(), count, true}}).correct(average.data(), handed_in.data());
    ParameterArrays({{settled.data(), count, false}}).correct(average.data(), average.data());
    CHECK(settled == begun);
    for (std::size_t i = 0; i < count; ++i) {
      const double change = static_cast<double>(average[i]) - static_cast<double>(handed_in[i]);
      const auto expected = static_cast<float>(static_cast<double>(begun[i]) + change);
      const auto [least, greatest] = std::minmax({begun[i], average[i], handed_in[i]});
      CHECK(trained[i] == expected);
      CHECK(statistic[i] == std::clamp(expected, least, greatest));
    }
    const Vector near = [&] {
      Vector found = handed_in;
      for (float& number : found) number *= 1.25f;
      return found;
    }();
    ParameterArrays({{same.data(), count, true}}).correct(near.data(), handed_in.data());
    CHECK(same == near);
  }
}

void readers_see_whole_means() {
  constexpr std::size_t kCount = 2501, kHead = 2;
  constexpr std::uint64_t kVersions = 3000;
  const std::size_t bytes = 8 * kHead + 4 * kCount;
  AlignedArray<char> memory(Snapshot::nbytes(bytes));
  Snapshot writer(memory.data(), memory.size(), bytes, true);
  std::vector<std::thread> readers;
  for (int r = 0; r < 2; ++r)
    readers.emplace_back([&] {
      const Snapshot reader(memory.data(), memory.size(), bytes, false);
      std::vector<char> payload(bytes);
      std::uint64_t seen = 0;
      while (seen < kVersions) {
        const std::uint64_t version = reader.read(payload.data(), seen);
        if (version == seen) {
          std::this_thread::yield();
          continue;
        }
        seen = version;
        double head[kHead];
        std::memcpy(head, payload.data(), sizeof head);
        CHECK(head[0] == static_cast<double>(version) && head[1] == -1.0);
        Vector mean(kCount);
        std::memcpy(mean.data(), payload.data() + sizeof head, 4 * kCount);
        for (const float number : mean) CHECK(number == static_cast<float>(version));
      }
    });
  std::vector<Vector> vectors(3, Vector(kCount));
  for (std::uint64_t version = 1; version <= kVersions; ++version) {
    const double head[kHead] = {static_cast<double>(version), -1.0};
    for (std::size_t i = 0; i < 3; ++i)
      std::fill(vectors[i].begin(), vectors[i].end(), static_cast<float>(version + i) - 1.0f);
    CHECK(write_mean(writer, head, sizeof head, pointers(vectors), kCount) == version);
  }
  for (std::thread& reader : readers) reader.join();
  CHECK(throws<QueueError>([&] { write_mean(writer, memory.data(), 8, pointers(vectors), kCount); }));
  const std::vector<Vector> longer(3, Vector(kCount + 1));  // the head would end within a word
  CHECK(throws<QueueError>([&] { write_mean(writer, memory.data(), 12, pointers(longer), kCount + 1); }));
  CHECK(throws<Error>([&] { write_mean(writer, memory.data(), 16, {}, kCount); }));
}

}  // namespace

int main() {
  means_are_added_in_order_and_rounded_once();
  arrays_are_one_vector();
  late_averages_change_what_was_trained_since();
  readers_see_whole_means();
}
