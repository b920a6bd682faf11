/* The part of TensorFlow's C interface for operators and kernels that ops.cc uses.
 *
 * Written out here so that no header of TensorFlow is needed to build, and looked up by name when
 * the library is loaded, so that none of its libraries is needed to link. After TensorFlow's own
 * headers their types serve: tests/backends/test_tensorflow_ops.py compares all signatures so.
 */
#ifndef POLICY_TENSORFLOW_TENSORFLOW_C_H_
#define POLICY_TENSORFLOW_TENSORFLOW_C_H_

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#ifndef TENSORFLOW_C_OPS_H_
typedef struct TF_OpDefinitionBuilder TF_OpDefinitionBuilder;
typedef struct TF_ShapeHandle TF_ShapeHandle;
typedef struct TF_ShapeInferenceContext TF_ShapeInferenceContext;
#endif
#ifndef TENSORFLOW_C_KERNELS_H_
typedef struct TF_KernelBuilder TF_KernelBuilder;
typedef struct TF_OpKernelConstruction TF_OpKernelConstruction;
typedef struct TF_OpKernelContext TF_OpKernelContext;
#endif
#ifndef TENSORFLOW_C_TF_DATATYPE_H_
typedef int TF_DataType;
#endif
#ifndef TENSORFLOW_C_TF_STATUS_H_
typedef struct TF_Status TF_Status;
typedef int TF_Code;
#endif
#ifndef TENSORFLOW_C_TF_TENSOR_H_
typedef struct TF_Tensor TF_Tensor;
#endif

namespace tensorflow_c {

enum { kFloat = 1, kUint8 = 4, kInt64 = 9, kBfloat16 = 14, kHalf = 19 };
enum { kOk = 0, kInvalidArgument = 3, kResourceExhausted = 8, kInternal = 13 };

typedef void (*ShapeFunction)(TF_ShapeInferenceContext*, TF_Status*);
typedef void* (*CreateFunction)(TF_OpKernelConstruction*);
typedef void (*ComputeFunction)(void*, TF_OpKernelContext*);
typedef void (*DeleteFunction)(void*);

/* Name without TF_, result, arguments. */
#define POLICY_TENSORFLOW_FUNCTIONS(F)                                                            \
  F(NewStatus, TF_Status*, (void))                                                                \
  F(DeleteStatus, void, (TF_Status*))                                                             \
  F(SetStatus, void, (TF_Status*, TF_Code, const char*))                                          \
  F(GetCode, TF_Code, (const TF_Status*))                                                         \
  F(Message, const char*, (const TF_Status*))                                                     \
  F(NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char*))                               \
  F(OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                    \
  F(OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                   \
  F(OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                     \
  F(OpDefinitionBuilderSetShapeInferenceFunction, void, (TF_OpDefinitionBuilder*, ShapeFunction)) \
  F(RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                            \
  F(NewKernelBuilder, TF_KernelBuilder*,                                                          \
    (const char*, const char*, CreateFunction, ComputeFunction, DeleteFunction))                  \
  F(RegisterKernelBuilder, void, (const char*, TF_KernelBuilder*, TF_Status*))                    \
  F(OpKernelConstruction_GetAttrInt64, void,                                                      \
    (TF_OpKernelConstruction*, const char*, int64_t*, TF_Status*))                                \
  F(OpKernelConstruction_HasAttr, bool, (TF_OpKernelConstruction*, const char*, TF_Status*))      \
  F(OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                   \
  F(OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                             \
  F(ExpectedOutputDataType, TF_DataType, (TF_OpKernelContext*, int))                              \
  F(GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                          \
  F(AllocateOutput, TF_Tensor*,                                                                   \
    (TF_OpKernelContext*, int, TF_DataType, const int64_t*, int, size_t, TF_Status*))             \
  F(DeleteTensor, void, (TF_Tensor*))                                                             \
  F(TensorType, TF_DataType, (const TF_Tensor*))                                                  \
  F(NumDims, int, (const TF_Tensor*))                                                             \
  F(Dim, int64_t, (const TF_Tensor*, int))                                                        \
  F(TensorData, void*, (const TF_Tensor*))                                                        \
  F(NewShapeHandle, TF_ShapeHandle*, ())                                                          \
  F(DeleteShapeHandle, void, (TF_ShapeHandle*))                                                   \
  F(ShapeInferenceContextGetInput, void,                                                          \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                                \
  F(ShapeInferenceContextSetOutput, void,                                                         \
    (TF_ShapeInferenceContext*, int, TF_ShapeHandle*, TF_Status*))                                \
  F(ShapeInferenceContextSetUnknownShape, void, (TF_ShapeInferenceContext*, TF_Status*))          \
  F(ShapeInferenceContextRankKnown, int, (TF_ShapeInferenceContext*, TF_ShapeHandle*))            \
  F(ShapeInferenceContextWithRank, void,                                                          \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*, TF_Status*))           \
  F(ShapeInferenceContextWithRankAtLeast, void,                                                   \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, TF_ShapeHandle*, TF_Status*))           \
  F(ShapeInferenceContextSubshape, void,                                                          \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, int64_t, int64_t, TF_ShapeHandle*, TF_Status*))  \
  F(ShapeInferenceContextConcatenateShapes, void,                                                 \
    (TF_ShapeInferenceContext*, TF_ShapeHandle*, TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))

struct Api {
#define POLICY_TENSORFLOW_MEMBER(name, result, arguments) result(*name) arguments;
  POLICY_TENSORFLOW_FUNCTIONS(POLICY_TENSORFLOW_MEMBER)
#undef POLICY_TENSORFLOW_MEMBER

  /* Looks all functions up in the TensorFlow of this process. Gives the name of the first that is
   * not there, or NULL. */
  const char* resolve() {
    void* library = dlopen("libtensorflow_framework.so.2", RTLD_NOLOAD | RTLD_NOW);
    if (library == nullptr) return "libtensorflow_framework.so.2";
#define POLICY_TENSORFLOW_LOOK_UP(name, result, arguments)                   \
  name = reinterpret_cast<result(*) arguments>(dlsym(library, "TF_" #name)); \
  if (name == nullptr) return "TF_" #name;
    POLICY_TENSORFLOW_FUNCTIONS(POLICY_TENSORFLOW_LOOK_UP)
#undef POLICY_TENSORFLOW_LOOK_UP
    return nullptr;
  }
};

}  // namespace tensorflow_c

#endif  // POLICY_TENSORFLOW_TENSORFLOW_C_H_
