package main

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/spf13/pflag"

	"sppo.dev/cmd/internal/cli"
	"sppo.dev/internal/vm/cpu/simd"
)

func devices(*pflag.FlagSet) cli.Action {
	return func(env *cli.Env, _ []string) error {
		blas := "OpenBLAS is installed (--blas openblas)"
		if err := simd.UseOpenBLAS(true); err != nil {
			first, _, _ := strings.Cut(err.Error(), "\n")
			blas = "no OpenBLAS: " + first
		}
		_, err := fmt.Fprintf(env.Stdout, "cpu   %s, %d cores, products by our own kernels for %s; %s\n"+
			"sim   virtual time on the cluster for which a program was compiled\ncuda  %s\n",
			runtime.GOARCH, runtime.NumCPU(), simd.ISA(), blas, strings.Join(reportGPUs(), "\n      "))
		return err
	}
}
