package ir

// This file interprets the element types that rows allow for their operands.

// allows reports whether the operand, considered by itself, may have elements of type d.
func (o *Operand) allows(d DType) bool {
	switch o.Types {
	case "any":
		return true
	case "T", "F":
		return d == F32 || d == BF16
	}
	return d < NumDTypes && d.String() == o.Types
}

// typeText returns the types that the operand may have, for messages.
func (o *Operand) typeText() string {
	switch o.Types {
	case "T", "F":
		return "f32|bf16"
	}
	return o.Types
}
