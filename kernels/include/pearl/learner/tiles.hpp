// Keeps AMX's tiles set up from product to product, in the thread that made the object, until its end.
//
// Each product would set them up again, which takes 170 to 440 cycles, as it waits for the product before (measured). Code
// that does not know of this must not use AMX in the thread meanwhile. Without AMX it does nothing.
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
