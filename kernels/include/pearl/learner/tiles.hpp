// AMX's tiles from product to product, while an object of this type lives, in the thread that made it.
//
// Setting them up waits for the products before, and takes 170 to 440 cycles with that (measured). No other code may use
// AMX in this thread meanwhile. Without AMX it does nothing.
#pragma once

namespace pearl::learner {

class KeptTiles {
 public:
  KeptTiles();
  ~KeptTiles();
  KeptTiles(const KeptTiles&) = delete;
  KeptTiles& operator=(const KeptTiles&) = delete;
};

}  // namespace pearl::learner
