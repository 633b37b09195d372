// A zeroed array aligned to cache lines; the system commits large ones only when touched.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace pearl {

inline constexpr std::size_t kCacheLine = 64;

inline std::size_t round_up(std::size_t value, std::size_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// The size of a share where `count` things are split into as few shares as possible, of at most `most` each and all of
// about the same size. The last share may be smaller.
inline constexpr std::size_t even_share(std::size_t count, std::size_t most) {
  const std::size_t shares = count <= most ? 1 : (count + most - 1) / most;
  return (count + shares - 1) / shares;
}

template <class T>
class AlignedArray {
  static_assert(std::is_trivially_copyable_v<T>);

 public:
  AlignedArray() = default;
  explicit AlignedArray(std::size_t size) : size_(size) {
    const std::size_t nbytes = round_up(size * sizeof(T), kCacheLine);
    if (nbytes == 0) return;
#if defined(__linux__)
    if (nbytes >= kLarge) {
      // Random access over megabytes is bound by page walks: ask for huge pages. Smaller arrays, whose pages would lie
      // in the L2 cache as chance has it, are as fast in each process then.
      const std::size_t whole = round_up(nbytes, kHuge);
      void* mapped = ::mmap(nullptr, whole + kHuge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
      if (mapped == MAP_FAILED) throw std::bad_alloc();
      // Unmap what lies before and after the whole huge pages.
      char* start = static_cast<char*>(mapped);
      const std::size_t before = round_up(reinterpret_cast<std::uintptr_t>(start), kHuge) -
                                 reinterpret_cast<std::uintptr_t>(start);
      if (before > 0) ::munmap(start, before);
      if (before < kHuge) ::munmap(start + before + whole, kHuge - before);
      ::madvise(start + before, whole, MADV_HUGEPAGE);
      data_ = Pointer(reinterpret_cast<T*>(start + before), Release{whole});
      return;
    }
#endif
    void* allocated = std::aligned_alloc(kCacheLine, nbytes);
    if (allocated == nullptr) throw std::bad_alloc();
    std::memset(allocated, 0, nbytes);
    data_ = Pointer(static_cast<T*>(allocated), Release{0});
  }

  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  std::size_t size() const { return size_; }
  T& operator[](std::size_t i) { return data_.get()[i]; }
  const T& operator[](std::size_t i) const { return data_.get()[i]; }

 private:
  static constexpr std::size_t kHuge = std::size_t{1} << 21, kLarge = kHuge / 8;

  struct Release {
    std::size_t mapped = 0;
    void operator()(T* pointer) const {
#if defined(__linux__)
      if (mapped != 0) {
        ::munmap(pointer, mapped);
        return;
      }
#endif
      std::free(pointer);
    }
  };
  using Pointer = std::unique_ptr<T[], Release>;

  Pointer data_{nullptr, Release{}};
  std::size_t size_ = 0;
};

}  // namespace pearl
