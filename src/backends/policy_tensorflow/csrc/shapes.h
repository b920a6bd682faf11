/* The shapes of the operators' results, as far as those of their inputs are known.
 */
#ifndef POLICY_TENSORFLOW_SHAPES_H_
#define POLICY_TENSORFLOW_SHAPES_H_

#include "call.h"

namespace {

class Shape {
 public:
  Shape() : handle_(tf.NewShapeHandle()) {}
  ~Shape() { tf.DeleteShapeHandle(handle_); }
  Shape(const Shape&) = delete;
  Shape& operator=(const Shape&) = delete;
  operator TF_ShapeHandle*() const { return handle_; }

 private:
  TF_ShapeHandle* handle_;
};

bool good(const TF_Status* status) { return tf.GetCode(status) == static_cast<TF_Code>(kOk); }

/* [...] of input `x`, all of its axes or all but the last, with those of input `tail` behind. */
void shape_from(TF_ShapeInferenceContext* context, int output, int x, bool whole, int tail,
                TF_Status* status) {
  Shape given, leading, behind, result;
  tf.ShapeInferenceContextGetInput(context, x, given, status);
  if (!good(status) || !tf.ShapeInferenceContextRankKnown(context, given)) return;
  if (!whole) {
    tf.ShapeInferenceContextWithRankAtLeast(context, given, 1, given, status);
    if (good(status)) {
      tf.ShapeInferenceContextSubshape(context, given, 0, -1, leading, status);
    }
  }
  if (!good(status)) return;
  if (tail >= 0) {
    tf.ShapeInferenceContextGetInput(context, tail, behind, status);
    if (good(status)) tf.ShapeInferenceContextWithRank(context, behind, 1, behind, status);
    if (good(status)) {
      tf.ShapeInferenceContextConcatenateShapes(context, leading, behind, result, status);
    }
    if (good(status)) tf.ShapeInferenceContextSetOutput(context, output, result, status);
  } else {
    tf.ShapeInferenceContextSetOutput(context, output, whole ? given : leading, status);
  }
}

void shape_linear(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
  if (good(status)) shape_from(context, 0, 0, false, 3, status);
}

void shape_encode(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
  if (good(status)) shape_from(context, 0, 0, true, -1, status);
}

void shape_quantize_rows(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
  if (good(status)) shape_from(context, 0, 0, true, -1, status);
  if (good(status)) shape_from(context, 1, 0, false, -1, status);
}

/* Sizes that attributes give, which shape functions cannot read: Python sets these shapes. */
void shape_unknown(TF_ShapeInferenceContext* context, TF_Status* status) {
  tf.ShapeInferenceContextSetUnknownShape(context, status);
}

}  // namespace

#endif  // POLICY_TENSORFLOW_SHAPES_H_
