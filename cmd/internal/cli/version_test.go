package cli

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
)

func TestBuildOf(t *testing.T) {
	vcs := func(modified string) []debug.BuildSetting {
		return []debug.BuildSetting{{Key: "vcs.revision", Value: "0123456789abcdef"}, {Key: "vcs.modified", Value: modified}}
	}
	hashed := func() (string, error) { return "cafe", nil }
	for _, c := range []struct {
		info debug.BuildInfo
		hash func() (string, error)
		want string
	}{
		{debug.BuildInfo{}, hashed, "build cafe"},
		{debug.BuildInfo{}, func() (string, error) { return "", errors.New("no /proc") }, "unknown build"},
		{debug.BuildInfo{Settings: vcs("false")}, hashed, "commit 0123456789ab"},
		{debug.BuildInfo{Settings: vcs("true")}, hashed, "build cafe"}, // not identified by the commit
		{debug.BuildInfo{Main: debug.Module{Version: "v1.2.3", Sum: "h1:sum="}}, hashed, "module v1.2.3 h1:sum="},
	} {
		if got := buildOf(&c.info, c.hash); got != c.want {
			t.Errorf("%+v is %q, want %q", c.info, got, c.want)
		}
	}
}

// Programs that differ by a byte have different hashes; identical programs have the same hash.
func TestExecutableHash(t *testing.T) {
	const child = "SPPO_TEST_PRINT_HASH"
	if os.Getenv(child) != "" {
		hash, err := executableHash()
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(os.Getenv(child), []byte(hash), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	binary, err := os.ReadFile(self)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	hashOf := func(name string, binary []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, binary, 0o755); err != nil {
			t.Fatal(err)
		}
		c := exec.Command(path, "-test.run", "^TestExecutableHash$")
		c.Env = append(os.Environ(), child+"="+path+".hash")
		if out, err := c.CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		hash, err := os.ReadFile(path + ".hash")
		if err != nil || len(hash) != 12 {
			t.Fatalf("the hash is %q: %v", hash, err)
		}
		return string(hash)
	}
	same, again := hashOf("same", binary), hashOf("again", binary)
	other := hashOf("other", append(binary, 0)) // bytes after the last section are not loaded
	if same != again || same == other {
		t.Errorf("hashes of two copies are %s and %s, of another build %s", same, again, other)
	}
	if !strings.Contains(Version("app"), "app ") {
		t.Errorf("%q does not name the program", Version("app"))
	}
}
