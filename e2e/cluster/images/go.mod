module aerostat.dev/e2e/cluster/images

go 1.27

tool (
	aerostat.dev/e2e/cluster/images/hello
	aerostat.dev/e2e/cluster/images/pause
)
