// Package e2e tests guarantees of equality from end to end: a spec's text goes through every phase, its program
// runs on the cpu device, and the result is compared with that of another schedule of the same model, or with
// the published maths. The guarantees are numbered E1 to E6.
//
//	case_test.go      Case, one point of the space of models and schedules, and its text as a spec
//	run_test.go       from a case to a result; every program is verified and converted to both file formats and back
//	compare_test.go   definitions of equality: bitwise, or within rounding
//	cover_test.go     the set of cases that covers all pairs of settings
//	equal_test.go     E1, E2, E3, E5 over the set of cover_test.go, and over a large sample with SPPO_LONG=1
//	random_test.go    the same guarantees over random models and schedules of odd sizes
//	traits_test.go    properties of random specs, all of which the long form of the tests must have drawn
//	baselines_test.go  the shipped schedules of other systems
//	zero_test.go      parameters that ranks divide among themselves
//	naive_test.go     E4: the plain program against an independent implementation in float64
//	resume_test.go    E6: checkpoints
//	world_test.go     jobs of several processes
//	gpu_test.go       E1, E2, E3, E5 and E6 on GPUs, if there are any
//	field_test.go     the same guarantees over finite fields, where sums are exact
//	mutate_test.go    changes that break a program; mutants_test.go what the verifier says of them
//	meaning_test.go   what the proof of a program's meaning says of random specs and examples; score_test.go of broken programs
//	compositions_test.go  of errors that occur where ways to divide a job are combined
//	bench_test.go     training throughput, and compile time by number of instructions
//
// The package contains only tests. They use only the exported names of other packages, and do not depend on
// their internals.
package e2e
