package watch

import (
	"fmt"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Prometheus serves the newest values as metrics, on the loopback interface only.
type Prometheus struct {
	listener net.Listener
	server   *http.Server

	run        *prometheus.GaugeVec // always 1; its labels identify the run
	step, last prometheus.Gauge
	loss       *prometheus.GaugeVec // by data
	rate, norm prometheus.Gauge
	tokens     prometheus.Counter
	skipped    prometheus.Counter
	seconds    prometheus.Histogram
	share      *prometheus.GaugeVec // by part
	predicted  *prometheus.GaugeVec // by part
	expected   prometheus.Gauge
	memory     *prometheus.GaugeVec // by kind of memory
	layer      *prometheus.GaugeVec // by layer
	load       *prometheus.GaugeVec // by layer
	position   *prometheus.GaugeVec // by positions
}

// NewPrometheus starts a server on a port of 127.0.0.1; 0 means any free port.
func NewPrometheus(port uint16) (*Prometheus, error) {
	listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(port))))
	if err != nil {
		return nil, err
	}
	registry := prometheus.NewRegistry()
	gauge := func(name, help string) prometheus.Gauge {
		g := prometheus.NewGauge(prometheus.GaugeOpts{Name: "sppo_" + name, Help: help})
		registry.MustRegister(g)
		return g
	}
	by := func(name, help string, labels ...string) *prometheus.GaugeVec {
		g := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "sppo_" + name, Help: help}, labels)
		registry.MustRegister(g)
		return g
	}
	p := &Prometheus{
		listener: listener,
		run:      by("run_info", "The run; the value is 1.", "run", "version", "device", "machine"),
		step:     gauge("step", "Completed steps."),
		last:     gauge("last_step", "Number of the run's last step."),
		loss:     by("loss", "Mean loss of a token in the newest step or validation.", "data"),
		rate:     gauge("learning_rate", "Learning rate of the newest step."),
		norm:     gauge("gradient_norm", "Norm of the gradient before clipping."),
		tokens: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "sppo_tokens_total", Help: "Tokens trained on by this process.",
		}),
		skipped: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "sppo_skipped_steps_total", Help: "Steps of this process that left the weights unchanged.",
		}),
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "sppo_step_seconds", Help: "Durations of steps.", Buckets: prometheus.ExponentialBuckets(0.001, 2, 20),
		}),
		share:     by("step_time_share", "Share of the newest measured step, over all ranks.", "part"),
		predicted: by("predicted_step_time_share", "The same share in the simulated program.", "part"),
		expected:  gauge("predicted_step_seconds", "Duration of a step of the simulated program."),
		memory:    by("memory_peak_bytes", "Planned peak of the fullest rank.", "memory"),
		layer:     by("layer_gradient_norm", "Norm of the gradient of a layer.", "layer"),
		load:      by("layer_expert_load", "Largest load of an expert of a layer, divided by the mean.", "layer"),
		position:  by("position_loss", "Mean validation loss of tokens at these positions of their sequences.", "positions"),
	}
	registry.MustRegister(p.tokens, p.skipped, p.seconds, collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
	p.server = &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	go p.server.Serve(listener) // ended by Close
	return p, nil
}

// URL returns the address of the metrics.
func (p *Prometheus) URL() string { return fmt.Sprintf("http://%s/metrics", p.listener.Addr()) }

// Close implements Observer.
func (p *Prometheus) Close() error { return p.server.Close() }

// Observe implements Observer.
func (p *Prometheus) Observe(r Record) error {
	switch r := r.(type) {
	case *Run:
		p.begin(r)
	case *Step:
		p.stepped(r)
	case *Validation:
		p.loss.WithLabelValues("validation").Set(float64(r.Loss))
		for _, b := range r.ByPosition {
			p.position.WithLabelValues(b.Name()).Set(float64(b.Loss))
		}
	}
	return nil
}

func (p *Prometheus) begin(r *Run) {
	p.run.WithLabelValues(r.Name, r.Version, r.Device, r.Machine).Set(1)
	p.step.Set(float64(r.First))
	p.last.Set(float64(r.Steps))
	p.memory.WithLabelValues("device").Set(float64(r.DeviceMemory.Peak))
	p.memory.WithLabelValues("host").Set(float64(r.HostMemory.Peak))
	if r.Predicted == nil {
		return
	}
	p.expected.Set(float64(r.Predicted.Seconds))
	for _, part := range r.Predicted.Split.Parts() {
		p.predicted.WithLabelValues(part.Key).Set(part.Share)
	}
}

func (p *Prometheus) stepped(r *Step) {
	p.step.Set(float64(r.Step))
	p.loss.WithLabelValues("train").Set(float64(r.Loss))
	p.rate.Set(float64(r.LR))
	p.norm.Set(float64(r.GradNorm))
	if r.Skipped {
		p.skipped.Inc()
	}
	if r.Seconds.Finite() {
		p.seconds.Observe(float64(r.Seconds))
		p.tokens.Add(float64(r.TokensPerSecond) * float64(r.Seconds))
	}
	if r.Split != nil {
		for _, part := range r.Split.Parts() {
			p.share.WithLabelValues(part.Key).Set(part.Share)
		}
	}
	for layer, norm := range r.GradNorms {
		p.layer.WithLabelValues(layer).Set(float64(norm))
	}
	for layer, load := range r.ExpertLoad {
		p.load.WithLabelValues(layer).Set(float64(load))
	}
}
