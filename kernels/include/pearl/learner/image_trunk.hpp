// The part of a network that works on images: convolutions, poolings, ReLUs and sums, sample by sample.
//
// A feature map is stored row by row, position by position, its channels next to each other, with margins of zeros left
// and right of each row. Then the patch under a convolution's kernel is one contiguous run per row of the kernel, and
// each row of a convolution, and of its input's gradient, is one product of matrices (Gemm) whose vectors run over
// channels. So one sample is as fast as many, and a sample's maps stay in cache. Where the kernels can, convolutions take
// several images together instead: AMX (panel_convolution.hpp), and those that leave out zeros (sparse_convolution.hpp).
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pearl/aligned.hpp"
#include "pearl/learner/byte_convolution.hpp"
#include "pearl/learner/frame_convolution.hpp"
#include "pearl/learner/kernels.hpp"
#include "pearl/learner/op.hpp"
#include "pearl/learner/panel_convolution.hpp"
#include "pearl/learner/sparse_convolution.hpp"

namespace pearl::learner {

// A feature map's sizes and its place in memory.
struct MapShape {
  std::size_t channels = 0, height = 0, width = 0;
  std::size_t left = 0, right = 0;  // columns of zeros

  std::size_t row() const { return (left + width + right) * channels; }
  std::size_t positions() const { return height * width; }
  std::size_t numbers() const { return positions() * channels; }
  std::size_t inside() const { return left * channels; }  // where a row's first position begins
};

// Bytes stand for numbers in [0, 1].
inline constexpr float kByteScale = 1.0f / 255.0f;

class ImageTrunk;

// One thread's memory for the images of up to `panels` panels. With `gradients`, it keeps the maps of all of them.
class ImageWorkspace {
 public:
  ImageWorkspace(const ImageTrunk& trunk, std::size_t panels, bool gradients);

 private:
  friend class ImageTrunk;
  struct Loaded {
    const void* rows = nullptr;
    std::size_t count = 0;
  };

  bool keeps_maps_;
  std::size_t first_ = 0;           // the slot that the first maps belong to, unless all are kept
  const void* read_ = nullptr;      // the image in `input_` or `whole_`
  std::vector<Loaded> loaded_;      // of each panel
  AlignedArray<float> input_;       // a sample's input
  AlignedArray<std::uint8_t> mixed_;  // a sample's bytes with channels last
  AlignedArray<std::uint16_t> whole_;  // the same in bfloat16, for AMX
  AlignedArray<std::uint16_t> parts_;  // the first convolution's weights for AMX
  FrameConvolution::Workspace frames_;
  AlignedArray<std::uint16_t> panel_parts_, back_parts_;  // the weights of convolutions of panels
  AlignedArray<float> maps_;           // of each sample kept, but for the last map
  AlignedArray<float> last_maps_, last_slopes_;
  AlignedArray<float> slopes_;  // gradients of maps, of the samples that are taken together
  AlignedArray<float> weights_, back_weights_, sparse_back_weights_, weight_gradients_, scratch_;
};

class ImageTrunk {
 public:
  // Operations whose last result is flattened to features (channel, row, column). Throws LearnerError naming the
  // operation that does not fit, and unless `input_width` numbers are the image that the first one takes.
  ImageTrunk(const LearnerKernels& kernels, std::size_t input_width, bool of_bytes, const std::vector<Op>& ops,
             std::size_t parameters);

  std::size_t features() const { return shapes_.back().numbers(); }
  // Floats that one sample's maps take in a workspace with gradients.
  std::size_t sample_floats() const { return map_floats_ + floats(shapes_.back()); }

  // Remembers `count` images (count, channels, height, width), which forward() and backward() read.
  void load(const void* images, std::size_t count, ImageWorkspace& workspace, std::size_t panel) const;
  // Writes the features of the panel's images into `features`, a panel.
  void forward(const float* parameters, ImageWorkspace& workspace, std::size_t panel, float* features) const;
  // Adds the gradients of the parameters over all images of `panels` panels, or sets them unless `accumulate`.
  // slopes(panel): the features' gradient, as forward() writes features. Call forward() on each panel before.
  template <class Slopes>
  void backward(const float* parameters, float* gradients, ImageWorkspace& workspace, std::size_t panels,
                bool accumulate, const Slopes& slopes) const {
    begin_backward(parameters, workspace, panels);
    for (std::size_t p = 0; p < panels; ++p) backward_panel(workspace, p, slopes(p));
    end_backward(gradients, workspace, accumulate);
  }

 private:
  friend class ImageWorkspace;
  struct Step {
    Op op;
    std::size_t in[2], out;         // maps: 0 is the input
    bool relu = false;              // a convolution followed by one
    bool adds[2] = {false, false};  // adds to its input's gradient: a later step has already written it
    bool gates_input = false;       // applies the derivative of its input's ReLU in the same pass
    bool gated = false;             // the user of its result has applied its ReLU's derivative
    std::size_t weights = 0, back_weights = 0;  // where the workspace holds them
    bool of_panels = false;                     // can take a panel's images together, in these two ways
    PanelConvolution forward{}, backward{};
    std::size_t panel_parts = 0, back_parts = 0;
    // If it, its weights' gradients and its input's gradient can leave out zeros.
    std::optional<SparseConvolution> sparse_forward, sparse_gradients, sparse_backward;
    std::size_t sparse_back_weights = 0;
  };

  static std::size_t floats(const MapShape& shape);
  bool is_last(std::size_t map) const { return map + 1 == shapes_.size(); }
  float* map(ImageWorkspace& workspace, std::size_t map, std::size_t slot) const;
  float* slope(ImageWorkspace& workspace, std::size_t map, std::size_t slot) const;

  MapShape result_of(const Op& op, std::size_t index, std::vector<MapShape>& shapes) const;
  void plan(const std::vector<Op>& ops, const std::vector<MapShape>& shapes);
  bool plans_first();
  void use_panels();
  void use_sparse();
  void widen_margins();
  // Whether so many images of a panel are taken together, one step after the other; else one image after the other.
  bool together(std::size_t images) const { return sparse_ || (panels_ != nullptr && images >= kLeastImages); }
  const void* image(const ImageWorkspace& workspace, std::size_t slot) const;
  void read_image(const void* image, ImageWorkspace& workspace, bool whole) const;
  void add_first_gradients(const Step& step, ImageWorkspace& workspace, std::size_t slot, const float* dy) const;
  void pack(const float* parameters, ImageWorkspace& workspace) const;
  void pack_for_inputs(const Step& step, ImageWorkspace& workspace) const;
  void pack_sparse_backward(const Step& step, ImageWorkspace& workspace) const;
  PanelMaps<float> maps_of(ImageWorkspace& workspace, std::size_t map, std::size_t slot, bool slopes) const;
  PanelMaps<const float> read_maps_of(ImageWorkspace& workspace, std::size_t map, std::size_t slot, bool slopes) const;
  void forward_step(const Step& step, const float* bias, ImageWorkspace& workspace, std::size_t slot) const;
  void forward_together(const Step& step, const float* bias, ImageWorkspace& workspace, std::size_t slot,
                        std::size_t images) const;
  bool forward_sparse(const Step& step, const float* bias, ImageWorkspace& workspace, std::size_t slot,
                      std::size_t images) const;
  void begin_backward(const float* parameters, ImageWorkspace& workspace, std::size_t panels) const;
  void backward_panel(ImageWorkspace& workspace, std::size_t panel, const float* slopes) const;
  void begin_backward_step(const Step& step, ImageWorkspace& workspace, std::size_t slot) const;
  void backward_step(const Step& step, ImageWorkspace& workspace, std::size_t slot) const;
  void backward_together(const Step& step, ImageWorkspace& workspace, std::size_t slot, std::size_t images) const;
  void backward_sparse(const Step& step, ImageWorkspace& workspace, std::size_t slot, std::size_t images) const;
  void end_backward(float* gradients, ImageWorkspace& workspace, bool accumulate) const;
  void convolve(const Step& step, const float* x, const float* weights, const float* bias, float* y) const;
  void add_weight_gradients(const Step& step, const float* x, const float* dy, float* gradients) const;
  void add_bias_gradients(const Step& step, const float* dy, float* gradients) const;
  void input_gradients(const Step& step, const float* dy, const float* weights, const float* gate, float* dx) const;
  template <class Visit>
  void for_windows(const Step& step, const Visit& visit) const;
  void pool(const Step& step, const float* x, float* y) const;
  void pool_backward(const Step& step, const float* x, const float* y, const float* dy, float* dx) const;

  const LearnerKernels& kernels_;
  bool of_bytes_;
  const ByteConvolutionKernels* amx_ = nullptr;  // of the first step, if it is the only one that takes the input
  ByteConvolution first_{};
  std::optional<FrameConvolution> frames_;           // the first step, if its images may be frames of a game
  const PanelConvolutionKernels* panels_ = nullptr;  // if a step is of panels
  bool bytes_of_panels_ = false;                     // whether the weights' gradient of `first_` is
  std::vector<MapShape> shapes_;     // of the maps that are stored
  std::vector<std::size_t> places_;  // of each map but the input and the last: floats of a sample's maps
  std::vector<Step> steps_;
  std::size_t map_floats_ = 0, weights_ = 0, back_weights_ = 0, largest_weights_ = 0;
  std::size_t panel_parts_ = 0, back_parts_ = 0;
  bool sparse_ = false;  // whether any step is
  std::size_t sparse_back_weights_ = 0;
};

}  // namespace pearl::learner
